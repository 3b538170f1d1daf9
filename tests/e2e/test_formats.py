"""Checkpoint formats through the commands: a recipe exports GPTQ or AWQ, `inspect` shows it, `convert` and
`validate` take it further.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]


def stages(form: str, scheme: str, *, seq_len: int = 32) -> list[dict[str, Any]]:
    calibrate = RECIPE["stages"][0]
    quantize = {"kind": "quantize", "scheme": scheme, "round": {"kind": "rtn"}}
    return [{**calibrate, "seq_len": seq_len}, quantize, {"kind": "export", "formats": [form]}]


@pytest.mark.parametrize(("form", "scheme"), [("gptq", "W4A16_G128"), ("awq", "W4A16_G128_ASYM")])
def test_a_recipe_exports_a_format_that_every_command_takes(
    form: str, scheme: str, recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    code, out, err = command("plan", recipe(stages=stages(form, scheme)), "--json")
    assert code == 0, err
    (export,) = [stage for stage in json.loads(out)["stages"] if stage["kind"] == "export"]
    assert any(note.startswith("vLLM: loads") for note in export["notes"])
    code, _, err = command("run", recipe(stages=stages(form, scheme)), "--run-dir", work / "run")
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
        code, _, err = command("plan", recipe(stages=stages(form, scheme)))
        assert code == 2
        assert f"[{rule}]" in err
