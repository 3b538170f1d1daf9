"""A reminder: when code that decides a stage's numbers changes, its version must rise, or every cache keeps
the old numbers.

The code of a stage is what its package imports, directly or through others, with the members of every plug-in
set on the way and the CUDA sources beside them, without what `PASSED_OVER` lists. Comments and docstrings do
not count. After a change: if the numbers of a stage moved, raise its `version`; either way record again with

    python -m tests.contract.test_stage_fingerprints
"""

import ast
import functools
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import grimp
import pytest

from compress.plugins import PluginSet
from compress.stages import STAGES

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("stage_fingerprints.json")
PASSED_OVER = {
    "compress": "exports names",
    "compress.errors": "messages",
    "compress.plugins": "looks plug-ins up; which ones there are is found below",
    "compress.machine": "facts of the machine, which enter cache keys",
    "compress.recipe*": "what a recipe says enters the cache key as it is read",
    "compress.registry*": "the digest of the source enters the cache key",
    "compress.artifact*": "stores what a stage computed, in a format with a version of its own",
    "compress.stages": "declares what a stage is",
    "*.estimate": "what `compress plan` expects",
    "compress.stages.budget.ta*": "tables of times; their content enters the cache key",
    "compress.stages.budget.ti*": "measured times differ from run to run",
}
"""Modules that decide no number of a stage, with the reason. What only they import does not count either."""
PASSED_OVER_BY = {
    "export": {"compress.export.draft": "opens the draft of a checkpoint to serve it"}
    | {
        f"compress.{package}*": "the plan of `export` asks which schemes a quantization may give"
        for package in ("calibrate", "distill", "methods", "stages.budget", "stages.quantize")
    },
    **{
        kind: {"compress.export*": "reads the checkpoint whose digest enters the cache key"}
        for kind in ("calibrate", "prune", "distill", "draft", "quantize")
    },
}
"""What further decides no number of one stage, by its kind."""
KINDS = STAGES.names()


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("compress", cache_dir=None, exclude_type_checking_imports=True)


@functools.cache
def plugin_packages() -> Mapping[str, tuple[str, ...]]:
    """Module -> the packages whose members the plug-in sets defined there load."""
    found = {}
    for name in graph().find_modules_that_directly_import("compress.plugins"):
        values = vars(importlib.import_module(name)).values()
        nested = [each for value in values if isinstance(value, dict) for each in value.values()]
        sets = [each for each in (*values, *nested) if isinstance(each, PluginSet) and each is not STAGES]
        found[name] = tuple(dict.fromkeys(each.package for each in sets))
    return found


@functools.cache
def modules(kind: str) -> frozenset[str]:
    """The modules that decide the numbers of a stage."""
    passed_over = PASSED_OVER | PASSED_OVER_BY.get(kind, {})
    found: set[str] = set()
    waiting = list(_with_descendants(f"compress.stages.{kind}"))
    while waiting:
        name = waiting.pop()
        if name in found or any(fnmatchcase(name, pattern) for pattern in passed_over):
            continue
        found.add(name)
        waiting += graph().find_modules_directly_imported_by(name)
        waiting += [name.rpartition(".")[0]]  # importing a module runs the packages that it lies in
        for package in plugin_packages().get(name, ()):
            waiting += _with_descendants(package)
    return frozenset(found)


def _with_descendants(name: str) -> Iterator[str]:
    yield name
    yield from graph().find_descendants(name)


@functools.cache
def sources(kind: str) -> tuple[str, ...]:
    """Paths below `compress/` of the code of a stage: its modules, and the CUDA sources in their folders."""
    paths = set()
    for name in modules(kind):
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        paths |= {path, *path.parent.glob("*.cu"), *path.parent.glob("*.cuh")}
    return tuple(sorted(path.relative_to(ROOT / "compress").as_posix() for path in paths))


def digest(text: str, suffix: str) -> str:
    """Return a digest of the code without comments and docstrings."""
    if suffix == ".py":
        code = ast.unparse(_Bare().visit(ast.parse(text)))
    else:
        code = " ".join(re.sub(r"//.*", "", text).split())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Removes docstrings, those of attributes too."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        bare = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if bare else node


@functools.cache
def digest_of(path: str) -> str:
    return digest((ROOT / "compress" / path).read_text(encoding="utf-8"), Path(path).suffix)


def current() -> dict[str, dict[str, object]]:
    every = sorted({path for kind in KINDS for path in sources(kind)})
    return {
        "versions": {kind: STAGES.get(kind).version for kind in KINDS},
        "code": {path: digest_of(path) for path in every},
    }


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="recorded with Python 3.11, whose ast.unparse may differ from others",
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_stage_raises_its_version_or_records_that_no_number_moved(kind: str) -> None:
    recorded = json.loads(RECORD.read_text())
    changed = [path for path in sources(kind) if recorded["code"].get(path) != digest_of(path)]
    assert not changed, f"the code of stage '{kind}' changed; see the head of this file"
    assert recorded["versions"].get(kind) == STAGES.get(kind).version, "record the new version"


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("quantize", "kernels/columns/reference.py"),
        ("quantize", "calibrate/arithmetic.py"),
        ("quantize", "calibrate/kv.py"),
        ("quantize", "distill/scales.py"),
        ("quantize", "methods/quantize/rtn.py"),
        ("prune", "methods/prune/obs.py"),
        ("draft", "stages/draft/inits/eagle3.py"),
        ("draft", "methods/quantize/gptq.py"),
        ("validate", "runtime/engine.py"),
        ("validate", "kernels/compilers/nvrtc.py"),
    ],
)
def test_code_that_is_reached_through_imports_and_plugins_counts(kind: str, path: str) -> None:
    assert path in sources(kind)


def test_cuda_sources_count_for_validate() -> None:
    cuda = {path.relative_to(ROOT / "compress").as_posix() for path in (ROOT / "compress").rglob("*.cu*")}
    assert cuda
    assert cuda <= set(sources("validate"))


@pytest.mark.parametrize("kind", ["calibrate", "prune", "quantize", "export"])
def test_serving_and_the_command_line_do_not_count_for_weights(kind: str) -> None:
    assert not [
        path for path in sources(kind) if path.startswith(("cli/", "runtime/", "validate/", "pipeline/"))
    ]


def test_every_passed_over_pattern_matches_a_module() -> None:
    patterns = {*PASSED_OVER, *(each for further in PASSED_OVER_BY.values() for each in further)}
    assert not [each for each in patterns if not any(fnmatchcase(name, each) for name in graph().modules)]


def test_code_counts_and_words_do_not() -> None:
    code = 'X = 1\n"""What X is."""\n\ndef f(a):\n    """Return a."""\n    return a\n'
    same = "# why\nX = 1\n\ndef f(a):\n    return a  # as it is\n"
    other = code.replace("return a\n", "return a + 1\n")
    assert digest(code, ".py") != digest(other, ".py")
    assert digest(code.replace("What X is", "Another"), ".py") == digest(code, ".py")
    assert digest("int a; // one\n", ".cu") == digest("int a;\n", ".cu") != digest("int b;\n", ".cu")
    assert digest(same, ".py") != digest(other, ".py")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1) + "\n")
