"""Every scheme that a recipe can name goes all the way: quantized, exported, opened again, served, reported
with the kernel that ran.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint, open_weights
from compress.models.weights import build_decoder
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"round": {"kind": "rtn"}},
    "gptq": {"round": {"kind": "gptq"}},
    "balanced": {"preset": "balanced"},
    "smoothquant": {"round": {"kind": "gptq"}, "smooth": {"kind": "smoothquant"}},
    "awq": {"round": {"kind": "rtn", "scale": "mse"}, "smooth": {"kind": "awq", "num_ratios": 3}},
}
CASES = [
    ("W4A16_G64_ASYM", "rtn"),
    ("W4A16_CHANNEL_ASYM", "awq"),
    ("W3A16_G64", "balanced"),
    ("INT8_DYNAMIC", "smoothquant"),
    ("INT8_STATIC_ASYM", "smoothquant"),
    ("FP8_BLOCK", "balanced"),
    ("NVFP4_W4A4", "balanced"),
]
MORE_CASES = [
    ("INT8_STATIC", "gptq"),
    ("INT8_DYNAMIC_ASYM", "rtn"),
    ("W4A16_G64", "awq"),
    ("W4A16_G32", "gptq"),
    ("W4A16_G32_ASYM", "awq"),
    ("W4A16_CHANNEL", "gptq"),
    ("W2A16_G64_ASYM", "gptq"),
    ("FP8_BLOCK", "gptq"),
    ("NVFP4", "balanced"),
    ("MXFP4", "awq"),
    ("MXFP4_W4A4", "gptq"),
    ("MXFP8", "smoothquant"),
]


@pytest.mark.parametrize(("scheme", "method"), [*CASES, *(slow(*case) for case in MORE_CASES)])
@pytest.mark.one_in(4)
def test_a_scheme_goes_all_the_way(
    scheme: str,
    method: str,
    recipe: Callable[..., Path],
    command: Callable[..., tuple[int, str, str]],
    work: Path,
) -> None:
    calibrate, _, export, validate = RECIPE["stages"]
    stages = [
        calibrate,
        {"kind": "quantize", "scheme": scheme, **METHODS[method]},
        export,
        {**validate, "gates": {}},
    ]
    code, out, err = command("run", recipe(stages=stages), "--json")
    assert code == 0, err
    document = json.loads(out)
    evidence = Path(document["report"]).parent
    report = json.loads((evidence / "report.json").read_text())
    linears = [row for row in report["kernels"] if row["op"] == "linear" and row["layer"] is not None]
    assert {row["scheme"] for row in linears} == {scheme}
    assert all(row["kernel"].startswith(("reference.", "bags.")) and row["refused"] for row in linears)

    artifact = Path(document["artifact"]["path"])
    assert open_artifact(artifact).manifest.scheme == SCHEMES[scheme].to_json()
    opened = open_checkpoint(artifact)
    assert set(opened.schemes.values()) == {SCHEMES[scheme]}
    assert isinstance(opened.layer(0)["attn.q.weight"], QuantizedWeight)
    build_decoder(open_weights(artifact), dtype=torch.float32, device=torch.device("cpu"))
