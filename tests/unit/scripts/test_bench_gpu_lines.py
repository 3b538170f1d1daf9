"""Benchmarks whose numbers come from a GPU, on the CPU at a tiny shape: scoring beside a plain loop, a model
whose source is made in place, and long contexts.
"""

import json
from pathlib import Path

import pytest

from compress.kernels.operands.paged import TOKEN_HEAD_FORMATS
from scripts.eval_tasks import folder_at_hand
from tests.support.scripts import run_script
from tests.unit.scripts.test_bench_scripts import CONFIG, ROOT


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    return config


def rows_of(
    script: str,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: object,
) -> list[dict[str, float]]:
    """Return the rows that a script writes, and check that it shows its file as it printed it."""
    printed = run_script(monkeypatch, capsys, script, "--commit", "abc", "--out", out, *options)
    assert run_script(monkeypatch, capsys, script, "--show", out).strip() in printed
    document = json.loads(out.read_text())
    assert {"device", "versions", "commit", "date", "command"} <= document.keys()
    rows: list[dict[str, float]] = document["rows"]
    return rows


def test_a_candidate_is_compared_with_a_source_that_is_never_whole(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", shape, "--num-samples", 2, "--seq-len", 32, "--top-k", 16)
    divergences = {
        scheme: rows_of(
            "bench_in_place", tmp_path / f"{scheme}.json", monkeypatch, capsys, *options, "--scheme", scheme
        )[0]["kl_mean"]
        for scheme in ("W4A16_G32", "W8A16")
    }
    assert 0 < divergences["W8A16"] < divergences["W4A16_G32"]


def test_every_format_of_the_cache_has_a_row(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--context",
        60,
        "--batch-sizes",
        1,
        2,
        "--output-tokens",
        4,
        "--repeats",
        1,
        "--scheme",
        "W8A16",
    )
    formats = ("--formats", "dense", "INT8_TOKEN_HEAD")
    rows = rows_of(
        "bench_long_context", tmp_path / "out.json", monkeypatch, capsys, "--model", shape, *options, *formats
    )
    assert [(row["kv"], row["batch_size"]) for row in rows] == [
        ("F32", 1),
        ("F32", 2),
        ("INT8_TOKEN_HEAD", 1),
        ("INT8_TOKEN_HEAD", 2),
    ]
    assert rows[2]["tokens_per_gib"] > 3 * rows[0]["tokens_per_gib"]
    assert all(row["tpot_ms_p10"] <= row["tpot_ms_p50"] <= row["tpot_ms_p90"] for row in rows)


def test_attention_over_every_format_of_the_cache_is_checked_and_timed(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--contexts", 40, "--batch-sizes", 2)
    rows = rows_of(
        "bench_kv_attention", tmp_path / "out.json", monkeypatch, capsys, "--model", shape, *options
    )
    assert [row["scheme"] for row in rows] == ["F32", *TOKEN_HEAD_FORMATS]
    assert all(row["passed"] for row in rows)
    codes = {row["scheme"]: row["bytes"] for row in rows}
    assert codes["INT4_TOKEN_HEAD"] < codes["INT8_TOKEN_HEAD"] == codes["FP8_TOKEN_HEAD"] < codes["F32"]


@pytest.mark.slow
@pytest.mark.skipif(folder_at_hand(ROOT) is None, reason="the four benchmarks are not at hand")
def test_the_engine_scores_as_a_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--folder", folder_at_hand(ROOT), "--models", "builtin://reference", "--items", 1)
    rows = rows_of("bench_scoring", tmp_path / "out.json", monkeypatch, capsys, *options)
    assert [row["task"] for row in rows] == ["arc_easy", "hellaswag", "piqa", "lambada", "all"]
    assert all(row["num_equal"] == row["num_items"] for row in rows)
