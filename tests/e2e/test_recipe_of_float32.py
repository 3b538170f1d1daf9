"""A checkpoint of float32 tensors whose config states 16 bits: all of what is written has 16 bits."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE = RECIPE["stages"][:2]
STAGES = {
    "calibrated": [CALIBRATE, QUANTIZE],
    "without calibration": [{"kind": "quantize", "scheme": "W8A16", "round": {"kind": "rtn"}}],
    "pruned": [CALIBRATE, {"kind": "prune", "depth": {"keep": 2}}],
    "pruned in width": [CALIBRATE, {"kind": "prune", "ffn": {"keep": 0.5}}],
}


@pytest.mark.parametrize("name", STAGES)
def test_float32_tensors_are_rounded_to_the_dtype_of_the_model_also_outside_of_layers(
    name: str, recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    shutil.copytree(model_dir, work / "wide")
    source: dict[str, Any] = load_file(model_dir / "model.safetensors")
    wide = {key: each.float() + 1e-4 for key, each in source.items()}
    save_file(wide, work / "wide" / "model.safetensors")
    path = recipe(stages=[*STAGES[name], {"kind": "export"}], model=str(work / "wide"))
    code, _, err = command("run", path, "--run-dir", work / "run")
    assert code == 0, err
    assert f"{len(wide)} tensors are float32 in this bfloat16 checkpoint and rounded" in err
    written = load_file(work / "run" / "artifacts" / "export" / "model.safetensors")
    assert all(each.dtype != torch.float32 for each in written.values())
    for key in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(written[key], wide[key].to(torch.bfloat16))
