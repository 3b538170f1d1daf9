"""Files and JSON that somebody else may have made come in through `compress/untrusted/` only."""

import ast
from pathlib import Path

import pytest

from tests.support.of_all import of_all

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "compress" / "untrusted"
SOURCES = sorted(path for path in (ROOT / "compress").rglob("*.py") if DOOR not in path.parents)
OWN = "a file of this package"
EXCEPTIONS: dict[str, tuple[set[str], str]] = {
    "compress/artifact/atomic.py": ({"open", "os.open"}, "writes; opens for fsync"),
    "compress/artifact/writer.py": ({"json.loads"}, "JSON it has just written"),
    "compress/artifact/lock.py": ({"os.open"}, "files for their locks; their content is not read"),
    "compress/artifact/manifest.py": ({"json.loads"}, "JSON it has just written"),
    "compress/cli/doctor.py": ({"read_text"}, "what the kernel of the machine says"),
    "compress/cli/init.py": ({"read_text", "read_bytes"}, OWN),
    "compress/cli/output.py": ({"open", "os.open"}, "the null device, for writing"),
    "compress/cli/run_many.py": ({"json.loads"}, "documents of processes that this command started"),
    "compress/data/corpus.py": ({"read_bytes"}, "sources of the running Python"),
    "compress/data/tokens.py": ({"safe_open"}, "after a look that it is a plain file"),
    "compress/distill/kept.py": ({"safe_open"}, "after its digest was compared"),
    "compress/distill/learn.py": ({"json.loads"}, "a part of a resume point whose digest was compared"),
    "compress/kernels/compilers/nvrtc.py": (
        {"read_bytes", "read_text"},
        "code it has compiled, after its digest was compared; sources of this package",
    ),
    "compress/machine.py": ({"read_text"}, "what the kernel of the machine says"),
    "compress/models/config_facts.py": ({"read_text", "json.loads"}, OWN),
    "compress/models/known.py": ({"read_text", "json.loads"}, OWN),
    "compress/outcome/webhook.py": ({"open"}, "sends a request, and reads nothing of its answer"),
    "compress/ranks/group.py": ({"json.loads"}, "messages of processes of this run"),
    "compress/registry/blobs.py": ({"open", "os.open"}, "writes files of a pull"),
    "compress/registry/mlflow.py": ({"open"}, "writes the report that a run gets"),
    "compress/serve/app.py": ({"read_text"}, OWN),
    "compress/stages/budget/tables.py": ({"read_text", "json.loads"}, OWN),
    "compress/validate/contention.py": ({"read_text"}, "what the kernel of the machine says"),
    "compress/validate/report.py": ({"read_text", "json.loads"}, OWN),
}
"""What a file outside of the door may call, and what it reads so."""
METHODS = {"read_text", "read_bytes", "open"}
FUNCTIONS = {"open", "safe_open", "load_file", "fromfile", "memmap"}
QUALIFIED = {
    "json": {"load", "loads"},
    "os": {"open"},
    "io": {"open", "open_code"},
    "yaml": {"load", "safe_load"},
    "tomllib": {"load", "loads"},
    "torch": {"load", "from_file"},
}
NO_FILES = {"lzma", "gzip", "bz2"}
"""Modules whose `open` is given a stream that the door opened."""

each_source = of_all(SOURCES, lambda path: path.relative_to(ROOT).as_posix())


def ways_in(tree: ast.AST) -> set[str]:
    """Return the calls that open a file or parse JSON, under the names that `EXCEPTIONS` uses."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if module in QUALIFIED:
                if name in QUALIFIED[module]:
                    found.add(f"{module}.{name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module))) if module in NO_FILES:
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS | FUNCTIONS:
                found.add(name)
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
                found.add(name)
            case ast.ImportFrom(module=module, names=names) if module in QUALIFIED:
                found |= {f"{module}.{each.name}" for each in names if each.name in QUALIFIED[module]}
    return found


@each_source
def test_nothing_is_read_but_through_the_door(path: Path) -> None:
    allowed, _ = EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), (set(), ""))
    assert ways_in(ast.parse(path.read_text(encoding="utf-8"))) - allowed == set()


def test_every_exception_is_needed() -> None:
    for name, (allowed, reason) in EXCEPTIONS.items():
        assert ways_in(ast.parse((ROOT / name).read_text(encoding="utf-8"))) >= allowed, name
        assert reason


@pytest.mark.parametrize(
    "bad",
    [
        "json.loads(x)",
        "from json import loads",
        "open(x)",
        "path.open()",
        "Path(x).read_text()",
        "x.read_bytes()",
        "os.open(x, 0)",
        "io.open(x)",
        "safe_open(x, 'pt')",
        "safetensors.torch.load_file(x)",
        "numpy.fromfile(x)",
        "torch.load(x)",
        "yaml.safe_load(x)",
    ],
)
def test_the_check_above_sees_what_it_looks_for(bad: str) -> None:
    assert len(ways_in(ast.parse(bad))) == 1


def test_the_check_above_passes_what_is_no_way_in() -> None:
    assert (
        ways_in(ast.parse("json.dumps(x)\ngzip.open(stream)\nos.fstat(x)\nread_bytes(x, max_bytes=1)\n"))
        == set()
    )
