"""Llama 4: what `config.json` states of layers, experts and queries, in older and newer spellings, and what
is refused."""

import json
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.export.refusals import check_rules
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.layer_shape import Rope
from compress.models.pruning import with_layers
from compress.models.query_growth import query_growth
from compress.models.rope import inverse_frequencies
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES

CONFIG: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_chunk_size": 16,
    "floor_scale": 32,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


def test_layers_alternate_and_the_fourth_sees_everything() -> None:
    arch = arch_of()
    assert [layer.chunk for layer in arch.layers] == [16, 16, 16, None]
    assert [layer.rope is None for layer in arch.layers] == [False, False, False, True]
    assert [layer.experts is None for layer in arch.layers] == [True, False, True, False]
    assert [layer.intermediate_size for layer in arch.layers] == [80, 48, 80, 48]
    assert [arch.queries_grow(layer) for layer in arch.layers] == [False, False, False, True]
    assert [arch.has_unit_qk_norm(layer) for layer in arch.layers] == [True, True, True, False]
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch


def test_facts_of_llama_4_are_in_no_other_manifest() -> None:
    config = {"model_type": "llama", **{name: CONFIG[name] for name in CONFIG if "model_type" not in name}}
    of_llama_4 = {"attention_chunk_size", "floor_scale", "num_local_experts", "interleave_moe_layer_step"}
    config = {name: value for name, value in config.items() if name not in of_llama_4}
    config.pop("intermediate_size_mlp")
    facts, layers = family_of(config).read_config({**config, "rms_norm_eps": 1e-5}).to_json()
    assert not facts.keys() & {"growth_offset", "growth_unrotated", "unit_qk_norm"}
    assert "chunk" not in layers[0]


def test_queries_grow_by_positions_counted_from_one() -> None:
    factors = query_growth(arch_of(), torch.tensor([0, 30, 31, 62, 63, 95]))
    expected = [1, 1, 1 + 0.1 * torch.tensor(2.0).log(), 1 + 0.1 * torch.tensor(2.0).log()]
    assert torch.allclose(factors[:4], torch.tensor(expected))
    assert torch.allclose(factors[4:], 1 + 0.1 * torch.tensor([3.0, 4.0]).log())


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"attn_temperature_tuning": 4}, {"attn_temperature_tuning": True}),
        ({"attn_temperature_tuning": 0}, {"attn_temperature_tuning": False}),
        ({"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]}),
        ({"moe_layers": None}, {"moe_layers": [1, 3]}),
        (
            {"no_rope_layer_interval": 2},
            {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
        ),
    ],
)
def test_older_and_newer_spellings_mean_the_same(older: dict[str, Any], newer: dict[str, Any]) -> None:
    assert arch_of(**older).replace(config={}) == arch_of(**newer).replace(config={})


def test_no_layer_has_experts_where_none_is_listed() -> None:
    assert not arch_of(moe_layers=[]).has_experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "top_k = 2; it must be 1 where a router weighs the inputs of experts"),
        ({"no_rope_layers": [1, 0]}, "a list of 4 numbers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        (
            {"model_type": "smollm3", "layer_types": ["chunked_attention"] * 4},
            "beside an attention_chunk_size",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {**CONFIG, **changes}
    if "model_type" in changes:
        config = {name: value for name, value in config.items() if name not in ("attention_chunk_size",)}
        for name in (
            "intermediate_size_mlp",
            "floor_scale",
            "num_local_experts",
            "interleave_moe_layer_step",
        ):
            del config[name]
    with pytest.raises(UnsupportedArch, match=message):
        family_of(config).read_config(config)


def test_a_chunk_without_a_size_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="beside an attention_chunk_size"):
        arch_of(attention_chunk_size=None, layer_types=["chunked_attention"] * 4).replace(config={})


def test_layers_that_stay_keep_their_kinds() -> None:
    arch = with_layers(arch_of(), [1, 2, 3])
    family = family_of(CONFIG)
    written = family.write_config(arch)
    assert written["moe_layers"] == [0, 2]
    assert written["no_rope_layers"] == [1, 1, 0]
    assert written["layer_types"] == ["chunked_attention", "chunked_attention", "full_attention"]
    assert (written["intermediate_size"], written["intermediate_size_mlp"]) == (48, 80)
    assert family.read_config(written).replace(config={}) == arch.replace(config={})


def test_frequencies_with_nothing_between_long_and_short_are_finite() -> None:
    bounds = {"original_max_position": 100, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaled = inverse_frequencies(Rope(10000.0, "llama3", factor=8.0, **bounds), 16)  # type: ignore[arg-type]
    plain = inverse_frequencies(Rope(10000.0), 16)
    is_long = 2 * torch.pi / plain > 100
    assert is_long.any()
    assert not is_long.all()
    assert torch.equal(scaled, torch.where(is_long, plain / 8, plain))


def test_codes_of_experts_are_written_apart_or_not_at_all() -> None:
    arch = arch_of(hidden_size=128, intermediate_size=128, intermediate_size_mlp=256, head_dim=32)
    check_rules("compressed-tensors", arch, ModelScheme(SCHEMES["W4A16_G128"]))
    with pytest.raises(UnsupportedFormat, match="experts-apart"):
        check_rules("gptq", arch, ModelScheme(SCHEMES["W4A16_G128"]))
