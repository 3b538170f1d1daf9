"""The quality benchmark: rows of other tools are scored like ours; the table compares what is comparable."""

import sys
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.workspace import Workspace
from compress.quant.scheme import SCHEMES
from scripts.peer_quantize import TOOLS
from scripts.quality_bench import measure, methods, table

COPIES = """#!{python}
import json, shutil, sys
from safetensors import safe_open
question = json.load(open(sys.argv[2]))
with safe_open(question["tokens"], "pt") as tokens:
    assert tokens.get_tensor("tokens").shape == (3, 24)
shutil.copytree(question["model"], question["out"])
answer = {{"seconds": 2.0, "cpu_seconds": 1.0, "threads": 1, "versions": {{"llmcompressor": "9.9"}}}}
json.dump(answer, open(sys.argv[3], "w"))
"""


def row(tool: str, method: str, kl: float, seed: int = 0, scheme: str = "W4A16_G128") -> dict[str, Any]:
    numbers = dict.fromkeys(("kl_p99", "top1", "ppl_ratio", "seconds"), 1.0)
    interval = {"kl_interval": [kl / 2, kl * 2], "cpu_seconds": 10 * kl}
    return {
        "tool": tool,
        "scheme": scheme,
        "method": method,
        "seed": seed,
        "kl_mean": kl,
        **interval,
        **numbers,
    }


@pytest.mark.slow
def test_a_tool_that_changes_nothing_has_no_divergence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(COPIES.format(python=sys.executable))
    python.chmod(0o755)
    setting = measure.Setting(
        "builtin://reference", "builtin://python", "builtin://python-eval", 3, 24, 2, "cpu"
    )
    workspace = Workspace(tmp_path / "workspace")
    with workspace.lock():
        found = measure.measure_peer(setting, "llmcompressor-gptq", 0, workspace, python)
        with pytest.raises(RuntimeError, match="llmcompressor"):  # which the environment of the tests lacks
            measure.measure_peer(setting, "llmcompressor-gptq", 0, workspace, Path(sys.executable))
    assert (found["kl_mean"], found["top1"], found["seconds"]) == (0.0, 1.0, 2.0)
    assert (found["tool"], found["method"], found["scheme"]) == ("llmcompressor 9.9", "gptq", "W4A16_G128")


def test_a_tool_is_compared_with_balanced_on_common_seeds_of_its_scheme() -> None:
    rows = [
        *(row("compress", "balanced", kl, seed) for seed, kl in enumerate((0.02, 0.9, 0.04))),
        row("compress", "balanced", 7.0, scheme="W4A16_G128_ASYM"),
        *(row("other 1.0", "gptq", kl, seed) for seed, kl in ((0, 0.03), (2, 0.06))),
        row("other 1.0", "awq", 1.0, scheme="W4A16_G32"),
    ]
    (sentence,) = table.beside_peers(rows)
    assert "W4A16_G128: other 1.0 gptq has 1.50 x the KL" in sentence


def test_the_table_has_a_line_a_method_and_its_ratio_to_plain_rounding() -> None:
    rows = [
        row("compress", "rtn", 0.1),
        *(row("compress", "rtn", kl, seed, "FP8_DYNAMIC") for seed, kl in enumerate((0.008, 0.012))),
    ]
    lines = table.table(rows).splitlines()
    assert len(lines) == 2 + 2
    assert "| 2 | 0.01000 | 0.00200 | 0.00400-0.01600 | 0.100 |" in lines[-1]


def test_every_scheme_has_methods_and_every_tool_a_scheme() -> None:
    assert set(methods.SUITE) == (set(methods.SUITE) & set(SCHEMES)) | set(methods.MIXED)
    assert {each for names in methods.SUITE.values() for each in names} == set(methods.METHODS)
    assert {tool.scheme for tool in TOOLS.values()} <= {
        name for name, names in methods.SUITE.items() if "balanced" in names
    }
