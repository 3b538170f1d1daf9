"""A report's latency becomes rows that state their own conditions."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script

TIMES = {
    "ttft_ms_p50": 3.0,
    "ttft_ms_p95": 4.0,
    "tpot_ms_p50": 1.0,
    "tpot_ms_p95": 1.5,
    "tpot_ms_p99": 2.0,
    "floor_ms": 0.25,
}


def latency_row(batch_size: int) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "prompt_tokens": 128,
        "output_tokens": 32,
        "floor_frac": 0.25,
        "itl_ms_p50": 1.0,
        **TIMES,
    }


def test_rows_name_scheme_dtype_and_kernels_of_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {
        "title": "tiny in W4A16_G128",
        "artifact": {"source": "./tiny", "scheme": "W4A16_G128"},
        "environment": {"device": "NVIDIA H200", "driver": "580", "python": "3.12.3", "torch": "2.11.0"},
        "kernels": [
            {"op": "linear", "scheme": "W4A16_G128", "phase": "decode", "kernel": "w4"},
            {"op": "linear", "scheme": "W4A16_G128", "phase": "prefill", "kernel": "dense"},
            {"op": "attention_decode", "scheme": "BF16", "phase": "decode", "kernel": "chunks"},
        ],
        "latency": {"source": [latency_row(1)], "candidate": [latency_row(1), latency_row(4)]},
    }
    path = tmp_path / "report.json"
    out = tmp_path / "h200" / "runtime.json"
    path.write_text(json.dumps(report))
    run_script(monkeypatch, capsys, "result_file", path, out, "--shape", "tiny", "--commit", "abc")
    document = json.loads(out.read_text())
    assert (document["device"], document["driver"], document["commit"]) == ("NVIDIA H200", "580", "abc")
    assert [(row["scheme"], row["kv"], row["batch_size"]) for row in document["rows"]] == [
        ("BF16", "bf16", 1),
        ("W4A16_G128", "bf16", 1),
        ("W4A16_G128", "bf16", 4),
    ]
    assert all(
        row["shape"] == "tiny" and row["tp"] == 1 and TIMES.items() <= row.items() for row in document["rows"]
    )
    assert document["rows"][1]["kernels"] == ["attention_decode: chunks", "linear: w4"]
