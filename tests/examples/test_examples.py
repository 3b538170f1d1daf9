"""Every example runs as a newcomer would run it: in an empty directory, in a process of its own, on the
bundled model.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "quantize.py": r"reference-w4: perplexity",
    "generate.py": r"tokens/s",
    "mixed_precision.py": r"W4A16_G128 layers\.",
    "prune_and_distil.py": r"KL to the source: \d",
    "own_method.py": r"shrunk: mean relative error",
}
NOTEBOOK = ROOT / "examples" / "report.ipynb"
MAX_LINES = 40


def run(code: list[str], directory: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *code], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed_and_short() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert [file.name for file in files] == sorted(SCRIPTS)
    assert [file.name for file in files if len(file.read_text().splitlines()) > MAX_LINES] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    text = run([str(ROOT / "examples" / name)], tmp_path)
    assert re.search(SCRIPTS[name], text), text


def test_the_notebook_is_valid_and_carries_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert {"cells", "metadata", "nbformat", "nbformat_minor"} == notebook.keys()
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        assert cell["cell_type"] in ("markdown", "code")
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            fields |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert cell.keys() == fields


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    text = run(["cells.py"], tmp_path)
    assert "ppl_ratio <= 1.2" in text
    assert "ms to the first token" in text
