"""The benchmark of gated delta nets: every kernel beside the reference, by the rows of a pass."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.support.tiny_cases.facts import DELTA_NET
from tests.support.tiny_hf import build_config


def test_kernels_are_measured_beside_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "tiny"
    build_config("qwen3_5_text", DELTA_NET).save_pretrained(directory)
    out = tmp_path / "delta_net.json"
    facts = ("--model", directory / "config.json", "--commit", "abc", "--out", out)
    printed = run_script(monkeypatch, capsys, "bench_delta_net", *facts, "--rows", 1, 40, "--repeats", 3)
    rows = json.loads(out.read_text())["rows"]
    assert {(row["kernel"], row["num_rows"]) for row in rows} >= {
        (kernel, count) for kernel in ("host", "reference") for count in (1, 40)
    }
    for row in rows:
        assert 0 < row["ms_least"] <= row["ms_p50"] <= row["ms_largest"]
        assert row["error"] < 1e-4
    assert run_script(monkeypatch, capsys, "bench_delta_net", "--show", out).strip() in printed
