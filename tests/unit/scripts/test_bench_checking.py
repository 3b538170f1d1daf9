"""The benchmark of checking: both looks are timed, and the second is the shorter one."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script


def test_both_looks_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "checking.json"
    arguments = ("--gigabytes", 0.004, "--files", 2, "--repeats", 1, "--commit", "c", "--out", out)
    run_script(monkeypatch, capsys, "bench_checking", *arguments)
    first, second = json.loads(out.read_text())["rows"]
    assert first["seconds_p50"] > 0
    assert second["look"] == "again in the same run"
    assert first["gigabytes_per_s"] == pytest.approx(0.004 / first["seconds_p50"])
