"""A recipe with several schemes goes all the way: planned, quantized, resumed, exported, served, reported,
inspected and converted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint, open_weights
from compress.models.overrides import linear_names
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Command = Callable[..., tuple[int, str, str]]
OVERRIDES = {"layers.0.*": "dense", "*.ffn.down": "FP8_STATIC", "layers.2.attn.o": "W8A16"}


def stages(
    overrides: dict[str, str], form: str = "compressed-tensors", **changes: Any
) -> list[dict[str, Any]]:
    calibrate, quantize, _, validate = RECIPE["stages"]
    return [
        calibrate,
        {**quantize, "overrides": overrides, **changes},
        {"kind": "export", "formats": [form]},
        {**validate, "gates": {"size_ratio": 1}},
    ]


def expected(linear: str) -> str | None:
    if linear.startswith("layers.0."):
        return None
    return (
        "FP8_STATIC"
        if linear.endswith("ffn.down")
        else "W8A16"
        if linear == "layers.2.attn.o"
        else "W4A16_G128"
    )


def test_several_schemes_go_all_the_way(
    recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    path = recipe(stages=stages(OVERRIDES))
    code, out, err = command("plan", path, "--json")
    assert code == 0, err
    planned = {stage["kind"]: stage for stage in json.loads(out)["stages"]}
    code, out, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    quantized, exported = (work / "run" / "artifacts" / name for name in ("quantize", "export"))
    manifest = open_artifact(exported).manifest
    assert manifest.scheme is not None
    scheme = ModelScheme.from_json(manifest.scheme)
    source = open_checkpoint(model_dir)
    opened = open_checkpoint(exported)
    stored = open_weights(quantized)
    for linear in linear_names(opened.arch):
        name = expected(linear)
        assert scheme.for_linear(linear) == opened.schemes.get(linear) == (SCHEMES[name] if name else None)
    for idx in range(NUM_LAYERS):
        before = source.layer(idx)
        after = opened.layer(idx)
        between = stored.layer(idx)
        assert all(torch.equal(dense(after[name]), dense(between[name])) for name in before)
        assert {name for name, value in after.items() if isinstance(value, QuantizedWeight)} == {
            f"{linear}.weight"
            for linear in opened.arch.layers[idx].linears
            if expected(f"layers.{idx}.{linear}")
        }
    assert all(
        torch.equal(dense(stored.layer(0)[name]), dense(value)) for name, value in source.layer(0).items()
    )
    written = sum(record.size_bytes for record in manifest.files if record.path.endswith(".safetensors"))
    assert abs(planned["export"]["disk_bytes"] / written - 1) < 0.1

    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    served = {
        (row["layer"], row["linear"]): row["scheme"]
        for row in report["kernels"]
        if row["op"] == "linear" and row["layer"] is not None
    }
    assert served[0, "ffn.down"] == served[0, "attn.q+attn.k+attn.v"] == "F32"  # dense, on a CPU
    assert (served[1, "ffn.down"], served[2, "attn.o"], served[1, "attn.o"]) == (
        "FP8_STATIC",
        "W8A16",
        "W4A16_G128",
    )
    assert {row["scheme"] for row in report["layers"]} == {"W4A16_G128", "FP8_STATIC", "W8A16"}
    assert {(row["layer"], row["linear"]) for row in report["layers"]} == {
        (int(name.split(".")[1]), name.split(".", 2)[2])
        for name in linear_names(opened.arch)
        if expected(name)
    }
    assert report["artifact"]["exceptions"]["FP8_STATIC"] == "ffn.down of 1–2"
    assert "ffn.down of 1–2" in (work / "run" / "evidence" / "report.html").read_text()
    code, out, _ = command("inspect", exported)
    assert code == 0
    assert "7 linears dense" in out
    assert '"ffn.down": "FP8_STATIC"' in out
    code, out, _ = command("run", path, "--run-dir", work / "run", "--json")
    assert all(step["cached"] for step in json.loads(out)["stages"])


def test_a_packed_format_takes_dense_linears_beside_one_scheme_and_no_second_scheme(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    for form in ("gptq", "awq"):
        code, _, err = command("plan", recipe(stages=stages(OVERRIDES, form)))
        assert code == 2
        assert "[one-scheme]" in err
    two = {"layers.1.ffn.gate": "dense", "layers.1.ffn.up": "dense", "*.attn.o": "dense"}
    code, _, err = command("run", recipe(stages=stages(two, "gptq")[:-1]), "--run-dir", work / "run")
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export"
    dynamic = json.loads((exported / "config.json").read_text())["quantization_config"]["dynamic"]
    assert any(
        "layers\\.1\\.mlp\\.gate_up_proj" in pattern for pattern in dynamic
    )  # by the name that vLLM asks for
    schemes = open_checkpoint(exported).schemes
    assert len(schemes) == 7 * NUM_LAYERS - 2 - NUM_LAYERS
    for form in ("awq", "compressed-tensors"):
        assert command("convert", exported, "--to", form, "--out", work / form)[0] == 0
        assert open_checkpoint(work / form).schemes == schemes
        assert open_artifact(work / form).manifest.scheme == open_artifact(exported).manifest.scheme


def test_a_pattern_that_matches_nothing_is_refused_before_any_work(
    recipe: Callable[..., Path], command: Command
) -> None:
    for word in ("plan", "run"):
        code, _, err = command(word, recipe(stages=stages({"*.down_proj": "dense"})))
        assert code == 2
        assert "the pattern '*.down_proj' matches no linear. Did you mean '*.ffn.down'" in err
