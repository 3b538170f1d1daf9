"""The benchmark of waiting threads: every setting is measured alone and beside busy processes."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_script


@pytest.mark.slow
def test_every_setting_is_measured_alone_and_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "waiting.json"
    printed = run_script(
        monkeypatch, capsys, "bench_waiting", "--tokens", 2, "--rounds", 1, "--out", out, "--commit", "c"
    )
    document = json.loads(out.read_text())
    assert {(row["company"], row["spin_count"]) for row in document["rows"]} == {
        (company, setting) for company in ("none", "busy") for setting in ("default", "3000", "0")
    }
    for row in document["rows"]:
        assert 0 < row["tpot_ms_min"] <= row["tpot_ms_p50"] <= row["tpot_ms_max"]
        assert f"{row['tpot_ms_p50']:.2f}" in printed
