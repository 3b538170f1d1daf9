"""The benchmark of drafts on the bundled model: what is trained is served, and a greedy row has the tokens of
plain decoding.
"""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script


@pytest.mark.slow
def test_every_draft_has_a_row_beside_lookup_and_the_draft_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [
        "--num-prompts",
        "2",
        "--prompt-tokens",
        "16",
        "--output-tokens",
        "12",
        "--batch-sizes",
        "2",
        "--seq-len",
        "64",
    ]
    training = [
        "--tokens",
        "1024",
        "--batch-size",
        "4",
        "--micro-batch-size",
        "4",
        "--preset",
        "fast",
        "--num-samples",
        "2",
    ]
    settings = {
        "loss": {"kind": "forward_kl"},
        "optimizer": "adamw",
        "eval_samples": 1,
        "init": {"keep_layers": 6},
    }
    drafts = ["--draft", f"kl={json.dumps(settings)}"]
    files = ["--work", tmp_path / "work", "--commit", "abc", "--out", tmp_path / "out.json"]
    run_script(monkeypatch, capsys, "bench_draft", *sizes, *training, *drafts, *files)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = [(row["category"], row["temperature"], row["proposer"]) for row in rows]
    assert found == [
        ("code", each, name) for each in (1.0, 0.0) for name in ("ngram", "kl", "draft_undistilled")
    ]
    assert all(row["identical"] == 2 for row in rows if row["temperature"] == 0)
    for row in rows:
        assert 1 <= row["acceptance_length"] <= 5
        assert 0 <= row["acceptance_rate"] <= 1
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["accepted"]) / row["num_steps"])
    assert {row["tokens"] for row in rows if row["proposer"] == "kl"} == {1024}
