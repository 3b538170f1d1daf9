"""`scheme: dense`: weights stay, and the KV cache alone is quantized; or a few linears, by overrides."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.artifact.manifest import open_artifact
from compress.export import open_weights
from compress.quant.scheme import SCHEMES
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Command = Callable[..., tuple[int, str, str]]
Recipe = Callable[..., Path]
SCALES = {f"model.layers.{idx}.self_attn.{name}_scale" for idx in range(NUM_LAYERS) for name in "kv"}


def stages(*, form: str = "compressed-tensors", **quantize: Any) -> list[dict[str, Any]]:
    calibrate, _, _, validate = RECIPE["stages"]
    return [
        calibrate,
        {"kind": "quantize", "scheme": "dense", **quantize},
        {"kind": "export", "formats": [form]},
        validate,
    ]


@pytest.mark.parametrize(("kv_cache", "kv_format"), [("fp8", "FP8_STATIC"), ("int8", "INT8_TOKEN_HEAD")])
def test_the_kv_cache_alone_is_quantized(
    kv_cache: str, kv_format: str, recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    code, out, err = command("run", recipe(stages=stages(kv_cache=kv_cache)), "--json")
    assert code == 0, err
    exported = Path(json.loads(out)["report"]).parents[1] / "artifacts" / "export"
    before = load_file(model_dir / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert after.keys() - before.keys() == (SCALES if kv_cache == "fp8" else set())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    config = json.loads((exported / "config.json").read_text()).get("quantization_config")
    assert (config is None) == (kv_cache != "fp8")
    assert open_weights(exported).kv_format == kv_format
    report = json.loads(Path(json.loads(out)["report"]).with_name("report.json").read_text())
    assert (report["artifact"]["scheme"], report["artifact"]["kv_cache"]) == (None, kv_format)
    assert report["accuracy"]["kl_mean"]["value"] > 0  # it is the quantized cache that was measured


def test_converting_carries_the_scales_and_what_is_known_of_them(
    recipe: Recipe, command: Command, work: Path
) -> None:
    command("run", recipe(stages=stages(kv_cache="fp8")), "--until", "export")
    exported = work / "runs" / "recipe" / "artifacts" / "export"
    again = work / "again"
    code, out, err = command("convert", exported, "--to", "compressed-tensors", "--out", again)
    assert (code, "dense" in out) == (0, True), err
    facts = [open_artifact(path).manifest.facts["kv_cache"] for path in (exported, again)]
    assert facts[0] == facts[1]
    assert len(facts[0]["layers"]) == 2 * NUM_LAYERS
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (exported / name).read_bytes()
    code, _, err = command("convert", exported, "--to", "gptq", "--out", work / "gptq")
    assert code == 2
    assert "[dense-weights]" in err
    assert "[kv-scales]" in err


def test_dense_but_for_some_linears(recipe: Recipe, command: Command, work: Path) -> None:
    code, _, err = command(
        "run",
        recipe(
            stages=stages(overrides={"*.ffn.down": "W4A16_G128"}, round={"kind": "rtn"}, measure_error=True)
        ),
        "--until",
        "quantize",
    )
    assert code == 0, err
    manifest = open_artifact(work / "runs" / "recipe" / "artifacts" / "quantize").manifest
    assert [layer["exceptions"]["attn.o"] for layer in manifest.layers or ()] == ["dense"] * NUM_LAYERS
    assert manifest.scheme is not None
    assert manifest.scheme["name"] == SCHEMES["W4A16_G128"].name
    assert {row["linear"] for row in manifest.facts["layers"]} == {"ffn.down"}


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        ({}, "quantizes nothing. Leave out the stage"),
        ({"kv_cache": "fp8", "preset": "balanced"}, "leave out preset and guide and target and refine"),
        ({"kv_cache": "fp8", "round": {"kind": "rtn"}}, "leave out round"),
        ({"kv_cache": "fp8", "head": "FP8_DYNAMIC"}, "leave out head"),
        ({"kv_cache": "fp8", "overrides": {"*": "dense"}}, "the KV cache alone"),
    ],
)
def test_what_would_do_nothing_is_refused(
    quantize: dict[str, Any], message: str, recipe: Recipe, command: Command
) -> None:
    code, _, err = command("plan", recipe(stages=stages(**quantize)))
    assert code == 2
    assert message in " ".join(err.split())


def test_a_format_without_words_for_it_is_refused_before_any_work(recipe: Recipe, command: Command) -> None:
    code, _, err = command("plan", recipe(stages=stages(kv_cache="fp8", form="gptq")))
    assert (code, "[dense-weights]" in err) == (2, True)
