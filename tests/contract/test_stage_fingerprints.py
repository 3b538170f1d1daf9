"""A reminder: when code that decides a stage's numbers changes, its version must rise, or every cache keeps the old numbers.

The recorded fingerprint of a stage covers the code (without comments and docstrings) of the modules that its numbers come from. After a
change: if the numbers moved, raise the stage's `version`; either way record again with

    python tests/contract/test_stage_fingerprints.py
"""

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from compress.stages import STAGES

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("stage_fingerprints.json")
MODULES = {
    "calibrate": ("data/corpus.py", "data/card.py", "data/tokens.py", "stages/calibrate.py"),
    "prune": (
        "calibrate/at_once.py",
        "calibrate/gradients.py",
        "calibrate/layer_run.py",
        "calibrate/layer_state.py",
        "calibrate/observe.py",
        "calibrate/residual.py",
        "calibrate/memory_guard.py",
        "calibrate/samples.py",
        "calibrate/sequential.py",
        "calibrate/stats.py",
        "calibrate/true_sequential.py",
        "kernels/latency.py",
        "methods/*/*.py",
        "models/attention.py",
        "models/causal_gradient.py",
        "models/decoder.py",
        "models/norm_gradient.py",
        "models/pruning.py",
        "models/rope.py",
        "stages/prune/*.py",
    ),
    "distill": (
        "data/tokens.py",
        "distill/*.py",
        "models/attention.py",
        "models/causal_gradient.py",
        "models/decoder.py",
        "models/initialise.py",
        "models/norm_gradient.py",
        "models/pruning.py",
        "models/rope.py",
        "stages/distill/*.py",
    ),
    "draft": (
        "data/tokens.py",
        "distill/*.py",
        "methods/prune/prune_pass.py",
        "models/attention.py",
        "models/causal_gradient.py",
        "models/decoder.py",
        "models/eagle3.py",
        "models/initialise.py",
        "models/norm_gradient.py",
        "models/pruning.py",
        "models/rope.py",
        "stages/distill/learning.py",
        "stages/distill/text.py",
        "stages/draft/*.py",
        "stages/draft/inits/*.py",
        "stages/prune/round.py",
    ),
    "quantize": (
        "calibrate/at_once.py",
        "calibrate/gradients.py",
        "calibrate/guide.py",
        "calibrate/layer_run.py",
        "calibrate/layer_state.py",
        "calibrate/observe.py",
        "calibrate/memory_guard.py",
        "calibrate/samples.py",
        "calibrate/sequential.py",
        "calibrate/stats.py",
        "calibrate/true_sequential.py",
        "kernels/latency.py",
        "methods/*/*.py",
        "models/attention.py",
        "models/causal_gradient.py",
        "models/decoder.py",
        "models/norm_gradient.py",
        "models/overrides.py",
        "models/rope.py",
        "models/surgery.py",
        "quant/*.py",
        "stages/budget/*.py",
        "stages/quantize/*.py",
    ),
    "export": (
        "export/*.py",
        "models/checkpoint.py",
        "models/family.py",
        "quant/packing.py",
        "stages/export.py",
    ),
    "validate": (
        "kernels/*.py",
        "kernels/*/*.py",
        "kernels/*/*.cu*",
        "runtime/*.py",
        "runtime/speculative/*.py",
        "validate/*.py",
        "stages/validate/*.py",
    ),
}


def fingerprint(kind: str) -> str:
    hasher = hashlib.sha256()
    for pattern in MODULES[kind]:
        for path in sorted((ROOT / "compress").glob(pattern)):
            hasher.update(f"{path.relative_to(ROOT)}\n{_code(path)}\n".encode())
    return hasher.hexdigest()


def _code(path: Path) -> str:
    if path.suffix != ".py":
        return " ".join(re.sub(r"//.*", "", path.read_text(encoding="utf-8")).split())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def current() -> dict[str, dict[str, object]]:
    return {kind: {"version": STAGES.get(kind).version, "fingerprint": fingerprint(kind)} for kind in MODULES}


def test_every_stage_has_a_fingerprint() -> None:
    assert set(MODULES) == set(STAGES.names())


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="recorded with Python 3.11, whose ast.unparse may differ from others",
)
@pytest.mark.parametrize("kind", MODULES)
def test_a_changed_stage_raises_its_version_or_says_that_no_number_moved(kind: str) -> None:
    recorded = json.loads(RECORD.read_text())[kind]
    assert current()[kind] == recorded, f"the code behind stage '{kind}' changed; see the head of this file"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1) + "\n")
