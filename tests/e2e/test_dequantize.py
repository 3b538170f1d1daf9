"""A run of a model that was published in codes: dequantized, quantized again, exported and validated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.calibrate.layer_files import store_layer
from compress.export import open_checkpoint, open_weights
from compress.models.weights import dense
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
IN_FP8 = [CALIBRATE, {"kind": "quantize", "scheme": "FP8_DYNAMIC"}, EXPORT]
DEQUANTIZE: dict[str, Any] = {"kind": "dequantize"}


def published(recipe: Recipe, command: Command, work: Path) -> Path:
    """Return a checkpoint in FP8."""
    code, _, err = command("run", recipe(stages=IN_FP8), "--run-dir", work / "published", "--json")
    assert code == 0, err
    return open_artifact(work / "published" / "artifacts" / "export").path


def test_a_model_in_codes_is_a_dense_one_for_the_stages_after_dequantize(
    recipe: Recipe, command: Command, work: Path
) -> None:
    model = published(recipe, command, work)
    refused = recipe(model=str(model), stages=[CALIBRATE, QUANTIZE, EXPORT])
    for verb in ("plan", "run"):
        code, _, err = command(verb, refused)
        assert code == 2
        assert "quantized already (quant_method 'compressed-tensors')" in err
        assert "`kind: dequantize`" in err

    path = recipe(model=str(model), stages=[DEQUANTIZE, CALIBRATE, QUANTIZE, EXPORT, VALIDATE])
    code, _, err = command("plan", path, "--json")
    assert code == 0, err
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    stored = open_checkpoint(model)
    widened = open_weights(open_artifact(work / "run" / "artifacts" / "dequantize").path)
    assert "quantization_config" not in widened.arch.config
    for idx in range(NUM_LAYERS):
        for name, value in stored.layer(idx).items():
            own = widened.layer(idx)[name]
            assert isinstance(own, torch.Tensor)
            assert torch.equal(own, dense(value, torch.bfloat16))
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert report["accuracy"]["kl_mean"]["value"] > 0
    assert open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path).schemes


def test_a_dense_model_is_not_dequantized(recipe: Recipe, command: Command) -> None:
    path = recipe(stages=[DEQUANTIZE, CALIBRATE, QUANTIZE, EXPORT])
    for verb in ("plan", "run"):
        code, _, err = command(verb, path)
        assert code == 2
        assert "dequantize: the model's weights are dense already" in err


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(
    recipe: Recipe, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = published(recipe, command, work)
    path = recipe(model=str(model), stages=[DEQUANTIZE, CALIBRATE, QUANTIZE, EXPORT])
    whole = ("--run-dir", work / "whole", "--workspace", work / "first")
    parts = ("--run-dir", work / "parts", "--workspace", work / "second")
    code, _, err = command("run", path, *whole)
    assert code == 0, err
    with monkeypatch.context() as patch:
        patch.setattr("compress.calibrate.data_free.store_layer", stopping_after(1))
        code, _, err = command("run", path, *parts)
        assert code != 0
    code, _, err = command("run", path, *parts)
    assert code == 0, err
    whole_path, parts_path = (
        open_artifact(work / each / "artifacts" / "dequantize").path for each in ("whole", "parts")
    )
    for name in ("layer-00000.safetensors", "layer-00001.safetensors", "outer.safetensors"):
        assert (whole_path / name).read_bytes() == (parts_path / name).read_bytes()


class Stopped(Exception):
    """The end of a run in the middle of a stage."""


def stopping_after(num_layers: int) -> Callable[..., None]:
    """Return what stores so many layers and then stops."""
    stored: list[int] = []

    def store(out: Path, idx: int, *rest: Any) -> None:
        if len(stored) == num_layers:
            raise Stopped
        stored.append(idx)
        store_layer(out, idx, *rest)

    return store
