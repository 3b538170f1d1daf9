"""Checkpoints in codes that are layouts of 16-bit numbers are read as dense models, and pass for such."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedFormat
from compress.export import open_checkpoint
from compress.models.family import family_of
from compress.models.weights import UNTOUCHED, Dense, build_decoder, check_untouched
from compress.quant.scheme import QuantizedWeight
from compress.stages.dequantize import check_dense
from tests.golden.test_convert import BLOCKS, INV, foreign_fp8
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import inner_widths, tokens

CPU = torch.device("cpu")
LAYOUT = {**BLOCKS, "scale_fmt": "ue8m0"}
INDEXED: dict[str, Any] = {
    "family": "deepseek_v32",
    **CASES["deepseek_v32"][1],
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 26,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
}


def stored(tmp_path: Path, said: dict[str, Any], **how: Any) -> tuple[Path, Path]:
    return foreign_fp8(tmp_path, said, scales="block", leaves=INV, **how)


@pytest.mark.parametrize("how", [{}, INDEXED], ids=["llama", "deepseek_v32"])
def test_codes_with_powers_of_two_are_read_as_the_weights_that_they_mean(
    how: dict[str, Any], tmp_path: Path
) -> None:
    theirs, meant = stored(tmp_path, LAYOUT, powers_of_two=True, **how)
    ours, dense = open_checkpoint(theirs), open_checkpoint(meant)
    assert not ours.schemes
    assert "quantization_config" not in ours.arch.config
    check_dense(ours.arch, "it is not")
    assert ours.arch.dtype == "bfloat16"
    for idx in range(ours.arch.num_layers):
        own, expected = ours.layer(idx), dense.layer(idx)
        assert own.keys() == expected.keys()
        assert all(
            torch.equal(torch.as_tensor(own[name]).float(), torch.as_tensor(expected[name])) for name in own
        )


def test_scales_that_are_no_powers_of_two_are_refused(tmp_path: Path) -> None:
    theirs, _ = stored(tmp_path, LAYOUT)
    with pytest.raises(UnsupportedFormat, match="not all powers of two"):
        open_checkpoint(theirs).layer(0)


def test_codes_of_indexers_are_widened_beside_codes_that_stay(tmp_path: Path) -> None:
    theirs, meant = stored(tmp_path, BLOCKS, **INDEXED)
    ours = open_checkpoint(theirs)
    assert "quantization_config" in ours.arch.config
    layer, expected = ours.layer(1), open_checkpoint(meant).layer(1)
    assert isinstance(layer["attn.q_down.weight"], QuantizedWeight)
    for name in ("q", "k", "weights"):
        own = layer[f"attn.indexer.{name}.weight"]
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own, torch.as_tensor(expected[f"attn.indexer.{name}.weight"]).to(torch.bfloat16))
    decoder = build_decoder(ours, dtype=torch.float32, device=CPU)
    plain = build_decoder(open_checkpoint(meant), dtype=torch.float32, device=CPU)
    tokens_BS = tokens(1, 12)
    torch.testing.assert_close(decoder(tokens_BS), plain(tokens_BS), rtol=1e-4, atol=1e-4)


def test_codes_of_gates_of_heads_are_widened_beside_codes_that_stay(tmp_path: Path) -> None:
    changes = {**CASES["laguna-by-default"][1], "moe_intermediate_size": 128, "head_dim": 32}
    theirs, meant = stored(
        tmp_path, BLOCKS, family="laguna", **{**changes, "shared_expert_intermediate_size": 128}
    )
    layer, expected = open_checkpoint(theirs).layer(1), open_checkpoint(meant).layer(1)
    assert isinstance(layer["attn.q.weight"], QuantizedWeight)
    own = layer["attn.head_gate.weight"]
    assert isinstance(own, torch.Tensor)
    assert torch.equal(own, torch.as_tensor(expected["attn.head_gate.weight"]).to(torch.bfloat16))


def test_codes_of_the_linears_around_experts_that_act_on_latents_are_widened(tmp_path: Path) -> None:
    changes = {
        **CASES["nemotron_h-latents"][1],
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 128,
        "mamba_head_dim": 32,
        "head_dim": 32,
    }
    theirs, meant = stored(tmp_path, BLOCKS, family="nemotron_h", **changes)
    layer, expected = open_checkpoint(theirs).layer(0), open_checkpoint(meant).layer(0)
    assert isinstance(layer["moe.experts.1.up.weight"], QuantizedWeight)
    for name in ("moe.latent_in.weight", "moe.latent_out.weight"):
        own = layer[name]
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own, torch.as_tensor(expected[name]).to(torch.bfloat16))


OF_LATENTS = ("beta", "decay_down", "decay", "gate_down", "gate")


@pytest.mark.parametrize(
    ("family", "widened"),
    [
        ("kimi_linear", OF_LATENTS),
        ("bailing_hybrid", ("decay",)),
        ("glm5_next", OF_LATENTS),
    ],
)
def test_codes_of_the_decays_and_gates_of_delta_nets_are_widened(
    family: str, widened: tuple[str, ...], tmp_path: Path
) -> None:
    changes = {**CASES[family][1], "moe_intermediate_size": 128}
    changes |= {**inner_widths(changes, 128), "linear_head_dim": 128, "linear_num_heads": 2}
    theirs, meant = stored(tmp_path, BLOCKS, family=family, **changes)
    layer, expected = open_checkpoint(theirs).layer(0), open_checkpoint(meant).layer(0)
    assert isinstance(layer["delta.q.weight"], QuantizedWeight)
    for name in widened:
        own = layer[f"delta.{name}.weight"]
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own, torch.as_tensor(expected[f"delta.{name}.weight"]).to(torch.bfloat16))


def test_codes_of_the_inner_linears_of_mamba1_mixers_are_widened(tmp_path: Path) -> None:
    changes = {**CASES["jamba"][1], "mamba_dt_rank": 128}
    theirs, meant = stored(tmp_path, BLOCKS, family="jamba", **changes)
    layer, expected = open_checkpoint(theirs).layer(0), open_checkpoint(meant).layer(0)
    assert isinstance(layer["mamba1.gate.weight"], QuantizedWeight)
    for name in ("x_proj", "dt_proj"):
        own = layer[f"mamba1.{name}.weight"]
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own, torch.as_tensor(expected[f"mamba1.{name}.weight"]).to(torch.bfloat16))


def test_float16_holds_no_layout(tmp_path: Path) -> None:
    theirs, _ = stored(tmp_path, LAYOUT, powers_of_two=True)
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    with pytest.raises(UnsupportedFormat, match="Set dtype to bfloat16"):
        open_checkpoint(theirs)


@pytest.mark.parametrize(
    "left",
    [
        {"visual.proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)},
        {"visual.proj.weight_scale_inv": torch.ones(1, 1)},
        {"visual.proj.weight_packed": torch.ones(1, 1, dtype=torch.int8)},
    ],
    ids=["codes", "scales", "words"],
)
def test_codes_of_parts_that_stay_are_not_passed_on_without_their_config(
    left: dict[str, torch.Tensor],
) -> None:
    named = {f"{UNTOUCHED}{name}": value for name, value in left.items()}
    with pytest.raises(UnsupportedFormat, match=r"visual\.proj"):
        check_untouched(named)
    check_untouched(
        {f"{UNTOUCHED}visual.proj.weight": torch.ones(2, 2), f"{UNTOUCHED}mask": torch.ones(2) > 0}
    )


def test_indexers_in_16_bits_are_read_beside_codes(tmp_path: Path) -> None:
    theirs, _ = stored(tmp_path, BLOCKS, **INDEXED)
    path = theirs / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.indexer.weights_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = torch.full(tensors[name].shape, 0.5, dtype=torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    found = open_checkpoint(theirs).layer(0)["attn.indexer.weights.weight"]
    assert torch.equal(torch.as_tensor(found), tensors[name])


@pytest.mark.parametrize(
    ("file", "name", "method"),
    [
        ("mixtures", "openai/gpt-oss-20b", "mxfp4"),
        ("mixtures", "openai/gpt-oss-120b", "mxfp4"),
        ("deepseek", "deepseek-ai/DeepSeek-V3.2", "fp8"),
    ],
)
def test_published_layouts_pass_for_dense_models(file: str, name: str, method: str) -> None:
    rows = json.loads((Path(__file__).parent / "configs" / f"{file}.json").read_text())
    config = next(row["config"] for row in rows if row["name"] == name)
    assert config["quantization_config"]["quant_method"] == method
    arch = family_of(config).read_config(config)
    check_dense(arch, "it is not")
    assert arch.dtype == "bfloat16"


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-R1": (
        "deepseek_v3",
        {name: value for name, value in INDEXED.items() if name != "family" and "index" not in name},
        {},
    ),
    "MiniMax-M2": (
        "minimax_m2",
        {**CASES["minimax_m2"][1], "head_dim": 32, "intermediate_size": 128},
        {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "Qwen3-30B-A3B-FP8": (
        "qwen3_moe",
        {**CASES["qwen3-moe"][1], "moe_intermediate_size": 128, "head_dim": 32},
        {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_that_are_published_in_fp8_are_dequantized_as_their_weights_mean(
    name: str, tmp_path: Path
) -> None:
    family, changes, said = PUBLISHED[name]
    theirs, meant = stored(tmp_path, {**BLOCKS, **said}, family=family, **changes)
    source = open_checkpoint(theirs)
    assert any(".experts." in linear for linear in source.schemes)
    widened, dense = Dense(source), open_checkpoint(meant)
    assert "quantization_config" not in widened.arch.config
    for idx in range(source.arch.num_layers):
        own, expected = widened.layer(idx), dense.layer(idx)
        assert own.keys() == expected.keys()
        for each, value in own.items():
            tensor = torch.as_tensor(value)
            assert torch.equal(tensor, torch.as_tensor(expected[each]).to(tensor.dtype)), each
