"""A model that FP8 keys and values with one scale a layer ruin, silently in its own numbers: the warning and
the gate say so.

It is the bundled model with the keys of one head times 2^20 and the queries that meet them divided
(`scripts/kv_outliers.py`): the same function to the last bit.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.export import open_weights
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.weights import build_decoder
from compress.pipeline import resolve_source
from scripts.kv_outliers import Outliers

Command = Callable[..., tuple[int, str, str]]
GATE = 0.04
"""Between what FP8 weights, keys and values cost this model together, 0.011, and what the collapse does, 0.2
and more.
"""


@pytest.fixture
def collapsing(work: Path) -> Path:
    source = resolve_source("builtin://reference")
    base = open_weights(source.path)
    path = work / "model"
    outliers = Outliers(base, layer_idx=3, head=1, power=20)
    decoders = [
        build_decoder(each, dtype=torch.float32, device=torch.device("cpu")) for each in (base, outliers)
    ]
    tokens_BS = torch.randint(base.arch.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(*(decoder(tokens_BS) for decoder in decoders))
    path.mkdir()
    write_checkpoint(path, outliers)
    for file in source.text_files():
        if file.name != "config.json":
            shutil.copyfile(file, path / file.name)
    return path


def recipe(work: Path, model: str, kv_cache: str | None) -> Path:
    cache: dict[str, Any] = {} if kv_cache is None else {"kv_cache": kv_cache}
    document = {
        "version": 1,
        "model": model,
        "stages": [
            {"kind": "calibrate", "num_samples": 4, "seq_len": 128},
            {"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}, **cache},
            {"kind": "export"},
            {
                "kind": "validate",
                "num_samples": 6,
                "seq_len": 192,
                "latency": None,
                "gates": {"kl_mean": GATE},
            },
        ],
    }
    path = work / f"{kv_cache}.yaml"
    path.write_text(json.dumps(document))
    return path


def report_of(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((path / "report.json").read_text())
    return report


@pytest.mark.slow
def test_the_collapse_of_one_scale_a_layer_is_warned_of_and_gated_and_scales_a_head_pass(
    collapsing: Path, command: Command, work: Path
) -> None:
    code, _, err = command("run", recipe(work, str(collapsing), "fp8"))
    assert code == 3
    report = report_of(work / "runs" / "fp8" / "evidence")
    (warning,) = report["warnings"]
    for text in (
        err,
        (work / "runs" / "fp8" / "evidence" / "report.html").read_text(),
        (work / "runs/fp8/evidence/README.md").read_text(),
    ):
        assert "keys of layer 3" in " ".join(text.split())
    assert "kv_cache: fp8_token_head" in warning
    assert report["verdict"]["passed"] is False
    assert report["artifact"]["kv_cache"] == "FP8_STATIC"
    assert report["accuracy"]["kl_mean"]["lower"] > GATE  # for certain, not for want of certainty
    (lost,) = [row for row in report["kv_cache"]["layers"] if row["error"] > 0.1]
    assert (lost["layer"], lost["cache"]) == (3, "k")
    assert lost["error"] > 0.9
    assert lost["error_token_head"] < 0.03

    code, _, _ = command("run", recipe(work, str(collapsing), "fp8_token_head"))
    assert code == 0
    held = report_of(work / "runs" / "fp8_token_head" / "evidence")
    assert "warnings" not in held
    assert held["artifact"]["kv_cache"] == "FP8_TOKEN_HEAD"
    assert (
        "--kv-cache-dtype fp8_per_token_head"
        in (work / "runs" / "fp8_token_head" / "evidence" / "README.md").read_text()
    )

    exported = work / "runs" / "fp8" / "artifacts" / "export"
    same = (
        "--against",
        collapsing,
        "--num-samples",
        6,
        "--seq-len",
        192,
        "--no-latency",
        "--gate",
        f"kl_mean={GATE}",
    )
    for kv_format, expected in ((None, 3), ("FP8_TOKEN_HEAD", 0)):
        chosen = () if kv_format is None else ("--kv-format", kv_format)
        code, _, err = command("validate", exported, *same, *chosen, "--out", work / str(kv_format))
        assert code == expected
        assert ("keys of layer 3" in " ".join(err.split())) == (kv_format is None)
    assert command("validate", exported, *same, "--kv-format", "FP8", "--out", work / "unknown")[0] == 2


@pytest.mark.slow
def test_a_healthy_model_passes_the_same_gate_with_one_scale_a_layer(command: Command, work: Path) -> None:
    code, _, _ = command("run", recipe(work, "builtin://reference", "fp8"))
    assert code == 0
    report = report_of(work / "runs" / "fp8" / "evidence")
    assert "warnings" not in report
    assert max(row["error"] for row in report["kv_cache"]["layers"]) < 0.03
