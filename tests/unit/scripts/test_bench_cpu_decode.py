"""The benchmark of decode steps on a CPU: every scheme beside the dense model, by batch and by prompt."""

import json
from pathlib import Path

import pytest

from compress.kernels.linear.bags import bags_are_fast
from tests.support.scripts import run_script
from tests.support.tiny_decoder import QWEN3

CONFIG = {
    **QWEN3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def test_schemes_are_measured_beside_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "cpu_decode.json"
    sizes = ("--batch-sizes", 1, 3, "--prompt-tokens", 20, "--steps", 2, "--rounds", 2)
    facts = ("--model", config, "--commit", "abc", "--out", out)
    printed = run_script(
        monkeypatch, capsys, "bench_cpu_decode", *facts, *sizes, "--schemes", "W4A16_G32", "W8A16"
    )
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert [(row["scheme"], row.get("batch_size"), row.get("prompt_tokens")) for row in rows] == [
        (scheme, *what) for scheme in ("W4A16_G32", "W8A16") for what in ((1, None), (3, None), (None, 20))
    ]
    for row in rows:
        name = "step_ms" if "batch_size" in row else "ttft_ms"
        for each in (name, f"dense_{name}"):
            assert 0 < row[f"{each}_min"] <= row[f"{each}_p50"] <= row[f"{each}_p90"]
        assert row["speedup_min"] <= row["speedup_p50"] <= row["speedup_max"]
        assert row["dense_kernels"] == {
            "decode": ["reference.dense.tile4"],
            "prefill": ["reference.dense.tile48"],
        }
        if bags_are_fast():
            assert row["kernels"] == {"decode": ["bags.decode"], "prefill": ["bags.prefill.tile48"]}
            assert row["linear_bytes"] < row["dense_linear_bytes"] / 2
    assert run_script(monkeypatch, capsys, "bench_cpu_decode", "--show", out).strip() in printed
