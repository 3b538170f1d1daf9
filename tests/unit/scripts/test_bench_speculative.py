"""The benchmark of speculation on the bundled model: its file holds every condition, and its tokens are those of plain decoding."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_speculative.py"


def test_a_draft_that_is_the_model_is_right_and_everything_is_identical(tmp_path: Path) -> None:
    sizes = [
        "--num-prompts",
        "2",
        "--prompt-tokens",
        "16",
        "--output-tokens",
        "11",
        "--batch-sizes",
        "2",
        "--k",
        "3",
    ]
    command = [
        sys.executable,
        SCRIPT,
        *sizes,
        "--draft",
        "builtin://reference",
        "--commit",
        "abc",
        "--out",
        tmp_path / "out.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["proposer"], row["temperature"]) for row in rows] == [
        (name, t) for t in (0.0, 1.0) for name in ("ngram", "draft_model")
    ]
    assert all(row["identical"] == "2 of 2" for row in rows)
    assert all(1 <= row["acceptance_length"] <= 4 for row in rows)
    assert [row["acceptance_rates"] for row in rows if row["proposer"] == "draft_model"] == [[1.0] * 3] * 2
