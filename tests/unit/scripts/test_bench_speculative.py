"""The benchmark of speculation on the bundled model: its file holds every condition, and its tokens are those
of plain decoding.
"""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_right_and_everything_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    rest = ["--draft", "builtin://reference", "--commit", "abc", "--out", tmp_path / "out.json"]
    run_script(monkeypatch, capsys, "bench_speculative", *sizes, *rest)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["proposer"], row["temperature"]) for row in rows] == [
        (name, t) for t in (0.0, 1.0) for name in ("ngram", "draft_model")
    ]
    assert all(row["identical"] == "2 of 2" for row in rows)
    assert all(1 <= row["acceptance_length"] <= 4 for row in rows)
    assert [row["acceptance_rates"] for row in rows if row["proposer"] == "draft_model"] == [[1.0] * 3] * 2
