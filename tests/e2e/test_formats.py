"""Checkpoint formats through the commands: a recipe exports GPTQ or AWQ, `inspect` shows it, `convert` and
`validate` take it further.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]


def stages(*forms: str, scheme: str, seq_len: int = 32, scale: str = "min_max") -> list[dict[str, Any]]:
    calibrate = RECIPE["stages"][0]
    quantize = {"kind": "quantize", "scheme": scheme, "round": {"kind": "rtn", "scale": scale}}
    return [{**calibrate, "seq_len": seq_len}, quantize, {"kind": "export", "formats": [*forms]}]


@pytest.mark.parametrize(("form", "scheme"), [("gptq", "W4A16_G128"), ("awq", "W4A16_G128_ASYM")])
def test_a_recipe_exports_a_format_that_every_command_takes(
    form: str, scheme: str, recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    code, out, err = command("plan", recipe(stages=stages(form, scheme=scheme)), "--json")
    assert code == 0, err
    (export,) = [stage for stage in json.loads(out)["stages"] if stage["kind"] == "export"]
    assert any(note.startswith("vLLM: loads") for note in export["notes"])
    code, _, err = command("run", recipe(stages=stages(form, scheme=scheme)), "--run-dir", work / "run")
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export"
    quantized = work / "run" / "artifacts" / "quantize"
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == (form, 4, 128)
    code, out, err = command("inspect", exported)
    assert code == 0, err
    assert form in out
    assert scheme in out
    assert "F16" in out

    # the artifact between stages converts to the same tensors as the export stage wrote
    code, _, err = command("convert", quantized, "--to", form, "--out", work / "converted")
    assert code == 0, err
    assert (work / "converted" / "model.safetensors").read_bytes() == (
        exported / "model.safetensors"
    ).read_bytes()
    assert (work / "converted" / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    assert command("verify", work / "converted")[0] == 0

    # and from there to the default format, validated against this one as the source
    code, _, err = command("convert", exported, "--to", "compressed-tensors", "--out", work / "ours")
    assert code == 0, err
    options = (
        "--num-samples",
        2,
        "--seq-len",
        32,
        "--no-latency",
        "--gate",
        "kl_mean=0",
        "--out",
        work / "proof",
    )
    code, out, err = command("validate", work / "ours", "--against", exported, *options, "--json")
    assert code == 0, err
    assert json.loads(out)["gates"][0]["value"] == 0


def test_a_scheme_that_the_format_cannot_say_is_refused_when_planning(
    recipe: Callable[..., Path], command: Command
) -> None:
    for form, scheme, rule in (
        ("gptq", "W4A16_G128_ASYM", "symmetric"),
        ("awq", "FP8_DYNAMIC", "weight-only"),
    ):
        code, _, err = command("plan", recipe(stages=stages(form, scheme=scheme)))
        assert code == 2
        assert f"[{rule}]" in err


def test_one_export_writes_the_same_codes_in_several_formats(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    forms = ("compressed-tensors", "gptq", "modelopt")
    code, out, err = command("plan", recipe(stages=stages(*forms, scheme="W4A16_G128")), "--json")
    assert code == 0, err
    (export,) = [stage for stage in json.loads(out)["stages"] if stage["kind"] == "export"]
    for form in forms:
        assert any(note.startswith(f"{form}: compress runtime: loads") for note in export["notes"])
    code, _, err = command(
        "run", recipe(stages=stages(*forms, scheme="W4A16_G128")), "--run-dir", work / "run"
    )
    assert code == 0, err
    exported = work / "run" / "artifacts" / "export"
    assert json.loads((exported / "compress.json").read_text())["facts"]["formats"] == {
        form: f"formats/{form}" for form in forms[1:]
    }
    assert command("verify", exported)[0] == 0
    for form in forms:
        code, _, err = command(
            "convert", work / "run" / "artifacts" / "quantize", "--to", form, "--out", work / form
        )
        assert code == 0, err
        written = exported if form == forms[0] else exported / "formats" / form
        assert (written / "tokenizer.json").is_file()
        for name in ("model.safetensors", "config.json"):
            assert (written / name).read_bytes() == (work / form / name).read_bytes()
    shown = json.loads(command("inspect", exported, "--json")[1])
    alone = {form: json.loads(command("inspect", work / form, "--json")[1])["by_dtype"] for form in forms}
    assert shown["by_dtype"] == alone[forms[0]]
    assert shown["folders"] == {f"formats/{form}": alone[form] for form in forms[1:]}
    assert "\ntensors in formats/gptq\n" in command("inspect", exported)[1]
    options = ("--num-samples", 2, "--seq-len", 32, "--no-latency", "--gate", "kl_mean=1e-4")
    code, _, err = command(
        "validate",
        exported / "formats" / "modelopt",
        "--against",
        exported,
        *options,
        "--out",
        work / "proof",
    )
    assert code == 0, err


def test_static_fp8_for_modelopt_has_one_scale_for_the_linears_of_one_input(
    recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    code, _, err = command("plan", recipe(stages=stages("modelopt", scheme="FP8_STATIC")))
    assert code == 2
    assert "[one-scale]" in err
    assert "scale: matrix" in err
    made = stages("modelopt", scheme="FP8_STATIC", scale="matrix")
    code, _, err = command("run", recipe(stages=made), "--run-dir", work / "run")
    assert code == 0, err
    tensors = load_file(work / "run" / "artifacts" / "export" / "model.safetensors")
    source = load_file(model_dir / "model.safetensors")
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.down_proj",)):
        names = [f"model.layers.0.{part}" for part in parts]
        largest = max(float(source[f"{name}.weight"].abs().max()) for name in names)
        expected = (torch.tensor(2 * largest) / 896).to(torch.bfloat16).float()
        for name in names:
            assert tensors[f"{name}.weight_scale"] == expected
            codes = (source[f"{name}.weight"].float() / expected).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(tensors[f"{name}.weight"].float(), codes.float())
    for change in ({"refine": {"kind": "descent"}}, {"scheme": "FP8_DYNAMIC"}):
        code, _, err = command("plan", recipe(stages=[made[0], {**made[1], **change}, made[2]]))
        assert code == 2
        assert "scale: matrix" in err


@pytest.mark.parametrize(("form", "scheme"), [("gptq", "W4A16_G128"), ("awq", "W4A16_G128_ASYM")])
def test_plan_refuses_float16_scales_of_a_float32_model(
    form: str, scheme: str, recipe: Callable[..., Path], command: Command, work: Path, model_dir: Path
) -> None:
    shutil.copytree(model_dir, work / "float32")
    config = json.loads((model_dir / "config.json").read_text())
    (work / "float32" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: each.float() for name, each in tensors.items()}, work / "float32" / "model.safetensors")
    changes = {"model": str(work / "float32")}
    code, _, err = command("plan", recipe(stages=stages(form, scheme=scheme), **changes))
    assert code == 2
    assert f"[exact-scales] {form} keeps scales in float16" in err
    assert command("plan", recipe(stages=stages("compressed-tensors", scheme=scheme), **changes))[0] == 0
