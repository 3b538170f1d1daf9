"""Configs of models with short convolutions or Mamba-2 mixers: what is read, refused and written, and which
programs load what is exported of them."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.config_file import read_config
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.pruning import Widths, resized, with_layers
from compress.models.short_conv import ShortConv
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.untrusted.parse import Malformed, parse_json, read_json

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
LFM2 = {
    **SIZES,
    "model_type": "lfm2",
    "intermediate_size": 80,
    "block_multiple_of": 8,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
OLDER = {**LFM2, "layer_types": None, "full_attn_idxs": [1, 3]}
"""The same as an older config states it."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 12, "mamba_n_groups": 1}
KIMI = {
    **SIZES,
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 3,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **SIZES,
        **MAMBA,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "bamba": {
        **SIZES,
        **MAMBA,
        "model_type": "bamba",
        "intermediate_size": 48,
        "attn_layer_indices": [1],
    },
    "nemotron_h": {
        **SIZES,
        "model_type": "nemotron_h",
        "intermediate_size": 48,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 1,
        "hybrid_override_pattern": "M*-M",
    },
    "nemotron_h-latents": {
        **SIZES,
        "model_type": "nemotron_h",
        "intermediate_size": 48,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 12,
        "hybrid_override_pattern": "M*EM",
    },
}
each_mamba = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


def arch_of(config: Mapping[str, Any], **changes: Any) -> Arch:
    stated = {**config, **changes}
    return family_of(stated).read_config(stated)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    config = family_of(arch.config).write_config(arch)
    assert arch_of(config).replace(config={}) == arch.replace(config={})
    return config


def attending(arch: Arch) -> list[int]:
    return [idx for idx, layer in enumerate(arch.layers) if layer.attends]


@pytest.mark.parametrize(
    "config", [LFM2, OLDER, KIMI, *FAMILIES.values()], ids=["lfm2", "older", "kimi", *FAMILIES]
)
def test_a_manifest_of_a_family_is_read_back_equal(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    assert attending(arch) in ([1], [1, 3])
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch


def test_a_short_convolution_has_channels_of_the_model_and_no_keys() -> None:
    arch = arch_of(LFM2, conv_L_cache=4)
    assert [layer.recurrence for layer in arch.layers] == [ShortConv.of(32, 4), None] * 2
    assert ShortConv.of(32, 4).num_channels == 32
    assert ShortConv.of(32, 4).state_numbers == 0
    assert arch_of({**LFM2, "norm_eps": 1e-3}).norm_eps == 1e-3
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 56),
        ({"block_auto_adjust_ff_dim": True}, 56),
        ({"block_auto_adjust_ff_dim": False}, 80),
        ({"block_ffn_dim_multiplier": 1.3}, 72),
        ({"block_multiple_of": 1}, 53),
        ({"block_multiple_of": 1, "intermediate_size": 82}, 54),
        ({"block_multiple_of": 1, "block_ffn_dim_multiplier": 1.3}, 68),
        ({"block_multiple_of": None}, None),
        ({"block_ff_dim": 120}, 80),
        ({"block_ff_dim": 120, "block_auto_adjust_ff_dim": False}, 120),
    ],
    ids=str,
)
def test_the_width_of_an_ffn_is_stated_in_several_ways(changes: dict[str, Any], size: int | None) -> None:
    """Two thirds, rounded down, times a factor, rounded up; an older name counts before the newer."""
    stated = {**LFM2, **changes}
    if size is None:
        del stated["block_multiple_of"]
        size = 256
    arch = arch_of(stated)
    assert {layer.intermediate_size for layer in arch.layers} == {size}
    config = written(arch)
    assert {name: config.get(name) for name in stated if "ff" in name} == {
        name: each for name, each in stated.items() if "ff" in name
    }
    pruned = written(resized(arch, replace(Widths.of(arch), intermediate_size=24)))
    assert pruned["intermediate_size"] == 24
    assert pruned["block_auto_adjust_ff_dim"] is False
    assert pruned.get("block_ff_dim", 24) == 24
    assert ("block_ff_dim" in pruned) == ("block_ff_dim" in changes)


def test_older_configs_state_the_layers_with_attention() -> None:
    assert arch_of(OLDER).replace(config={}) == arch_of(LFM2).replace(config={})
    assert attending(arch_of(LFM2, full_attn_idxs=[0])) == [1, 3]
    assert attending(arch_of(OLDER, full_attn_idxs=None)) == [0, 1, 2, 3]


def test_the_tie_of_the_head_has_an_older_name() -> None:
    assert arch_of(LFM2).tied_head
    for tied in (True, False):
        assert arch_of(LFM2, tie_embedding=tied).tied_head is tied
        assert arch_of(LFM2, tie_word_embeddings=not tied, tie_embedding=tied).tied_head is tied
        written(arch_of(LFM2, tie_embedding=tied))


@pytest.mark.parametrize("value", [True, 1, "no"], ids=repr)
def test_a_bias_of_the_convolution_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedArch, match=r"conv_bias = .*False only"):
        arch_of(LFM2, conv_bias=value)
    assert arch_of(LFM2, conv_bias=False).replace(config={}) == arch_of(LFM2).replace(config={})


@pytest.mark.parametrize("config", [LFM2, OLDER], ids=["types", "indices"])
def test_layers_that_are_removed_are_in_no_config(config: dict[str, Any]) -> None:
    arch = with_layers(arch_of(config), [0, 2, 3])
    assert attending(arch) == [2]
    assert written(arch)["num_hidden_layers"] == 3


def test_layers_are_removed_from_a_config_that_states_them_in_both_ways() -> None:
    written(with_layers(arch_of(LFM2, full_attn_idxs=[1, 3]), [0, 2, 3]))


def test_types_of_the_layers_that_stay_are_those_of_transformers() -> None:
    """Its class takes a layer of any type but `conv` for one with attention."""
    config = written(with_layers(arch_of(LFM2), [0, 2, 3]))
    assert config["layer_types"] == ["conv", "conv", "full_attention"]


def test_a_head_that_is_untied_is_so_in_the_config_by_either_name() -> None:
    written(arch_of(LFM2, tie_embedding=True).replace(tied_head=False))


@each_mamba
def test_steps_of_time_without_a_limit_are_accepted_in_both_spellings(config: dict[str, Any]) -> None:
    plain = arch_of(config).replace(config={})
    for limit in ([0.0, math.inf], (0.0, math.inf), [0, {"__float__": "Infinity"}], None):
        assert arch_of(config, time_step_limit=limit).replace(config={}) == plain


@each_mamba
@pytest.mark.parametrize(
    "limit",
    [
        [0.0, 100.0],
        [0.001, math.inf],
        [0.0, {"__float__": "-Infinity"}],
        [0.0, {"__float__": "NaN"}],
        [0.0, "Infinity"],
        [0.0],
        [],
        "Infinity",
        7,
    ],
    ids=repr,
)
def test_other_limits_of_steps_of_time_are_refused(config: dict[str, Any], limit: Any) -> None:
    with pytest.raises(UnsupportedArch, match="time_step_limit"):
        arch_of(config, time_step_limit=limit)


@each_mamba
def test_a_config_file_may_have_the_bare_word_infinity(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "time_step_limit": [0.0, math.inf]}))
    assert "Infinity]" in path.read_text()
    read = read_config(tmp_path)
    assert read["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert arch_of(read).replace(config={}) == arch_of(config).replace(config={})
    with pytest.raises(Malformed, match="Infinity is not a number of JSON"):
        read_json(path)


@pytest.mark.parametrize("name", ["Infinity", "-Infinity"])
def test_infinity_is_spelled_only_where_a_reader_asks_for_it(name: str) -> None:
    assert parse_json(f"[{name}]", spells_constants=True) == [{"__float__": name}]
    for text in (f"[{name}]", "[NaN]"):
        with pytest.raises(Malformed, match="is not a number of JSON"):
            parse_json(text)
    with pytest.raises(Malformed, match="NaN"):
        parse_json("[NaN]", spells_constants=True)
    with pytest.raises(Malformed, match="too large"):
        parse_json("[1e999]", spells_constants=True)


@pytest.mark.parametrize("family", ["granitemoehybrid", "bamba"])
def test_the_dimension_of_a_head_fits_the_width_or_is_refused(family: str) -> None:
    config = FAMILIES[family]
    plain = arch_of(config).replace(config={})
    for right in ("auto", 16):
        assert arch_of(config, mamba_d_head=right).replace(config={}) == plain
    for wrong in (8, 32, 0, True, "16", "automatic", 16.0):
        with pytest.raises(UnsupportedArch, match="mamba_d_head"):
            arch_of(config, mamba_d_head=wrong)
    with pytest.raises(UnsupportedArch, match=r"mamba_n_heads = 5.*a divisor of 64"):
        arch_of(config, mamba_n_heads=5)


@each_mamba
def test_a_bias_of_the_projections_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match=r"mamba_proj_bias = True.*False only"):
        arch_of(config, mamba_proj_bias=True)
    assert arch_of(config, mamba_proj_bias=False).num_layers == 4


def test_without_a_layer_that_attends_bamba_lists_none() -> None:
    config = {**FAMILIES["bamba"], "attn_layer_indices": None}
    arch = with_layers(arch_of(config), [0, 2])
    assert attending(arch) == []
    assert written(arch)["attn_layer_indices"] == []
    assert "layer_types" not in written(arch)


def test_half_of_each_head_of_bamba_rotates() -> None:
    rope = arch_of(FAMILIES["bamba"]).layers[1].rope
    assert rope is not None
    assert rope.rotary_dim == 4
    with pytest.raises(UnsupportedArch, match="partial_rotary_factor"):
        arch_of(FAMILIES["bamba"], partial_rotary_factor=1.0)


@pytest.mark.parametrize("config", [LFM2, *FAMILIES.values()], ids=["lfm2", *FAMILIES])
def test_another_activation_is_refused(config: dict[str, Any]) -> None:
    name = family_of(config).spelled.get("hidden_act", "hidden_act")
    with pytest.raises(UnsupportedArch, match="activation 'tanh'" if name != "hidden_act" else name):
        arch_of(config, **{name: "tanh"})


def test_kimi_states_its_layers_and_delta_nets_in_a_mapping_or_as_transformers_does() -> None:
    arch = arch_of(KIMI)
    delta = DeltaNet(3, 3, 16, 16, 3, rank=16, by_channel=True)
    assert [layer.recurrence for layer in arch.layers] == [delta, None, delta, None]
    assert [layer.latent is not None for layer in arch.layers] == [False, True, False, True]
    assert {layer.rope for layer in arch.layers} == {None}
    flat = {
        **KIMI,
        "linear_attn_config": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 3,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 3,
    }
    assert arch_of(flat).replace(config={}) == arch.replace(config={})
    assert attending(arch_of({**flat, "layer_types": None})) == []
    assert attending(arch_of({**flat, "layer_types": None}, num_hidden_layers=6)) == [4]
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("more", [{}, {"layer_types": ["linear_attention", "full_attention"] * 2}])
def test_a_mapping_of_kimi_lists_the_layers_that_stay(more: dict[str, Any]) -> None:
    config = written(with_layers(arch_of(KIMI, **more), [0, 2, 3]))
    own = config["linear_attn_config"]
    assert (own["full_attn_layers"], own["kda_layers"], own["head_dim"]) == ([3], [1, 2], 16)
    assert config["num_hidden_layers"] == 3
    assert "first_k_dense_replace" not in config
    without_dense = written(with_layers(arch_of(KIMI, **more), [1, 2]))
    assert without_dense["first_k_dense_replace"] == 0
    assert without_dense["mlp_layer_types"] == ["sparse", "sparse"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types = .*linear_attn_config states"),
        ({"full_attn_layers": [2]}, "full_attn_layers = .*from 1 to 4, each once"),
        ({"full_attn_layers": [1, 2, 4]}, "full_attn_layers = .*from 1 to 4, each once"),
        ({"kda_layers": [1, 5]}, "full_attn_layers = .*from 1 to 4, each once"),
        ({"mla_use_nope": False}, "mla_use_nope = False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"auto_map": {"AutoModel": "modeling_other.OtherModel"}}, "auto_map"),
    ],
    ids=str,
)
def test_what_kimi_computes_otherwise_or_states_twice_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    own = dict(KIMI["linear_attn_config"])
    own |= {name: changes[name] for name in changes if name in own}
    others = {name: value for name, value in changes.items() if name not in own}
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(KIMI, linear_attn_config=own, **others)


def test_decays_of_channels_are_for_heads_with_keys_of_their_own() -> None:
    arch = arch_of(KIMI)
    first = replace(arch.layers[0], recurrence=DeltaNet(4, 2, 16, 16, 3, rank=16, by_channel=True))
    with pytest.raises(UnsupportedArch, match="4 heads with decays of the channels of 2 key heads"):
        arch.replace(layers=(first, *arch.layers[1:]))


def test_fewer_experts_are_stated_by_each_name_that_a_config_has() -> None:
    stated = {
        **SIZES,
        "model_type": "qwen3_moe",
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
    for names in (["num_experts"], ["num_local_experts"], ["num_experts", "num_local_experts"]):
        arch = arch_of({**stated, **dict.fromkeys(names, 8)})
        fewer = tuple(replace(each, experts=replace(each.experts, num_experts=4)) for each in arch.layers)
        config = family_of(stated).write_config(replace(arch, layers=fewer))
        assert [config.get(name) for name in names] == [4] * len(names)


def consumers(arch: Arch, form: str, scheme: ModelScheme) -> dict[str, str | None]:
    """Return the consumers of an export and why they do not load it, None where they do."""
    stated = FORMATS.get(form).consumers(arch, scheme)
    return {each.name: None if each.loads else each.note for each in stated}


def test_vllm_loads_kimi_as_its_published_configs_state_it() -> None:
    w8 = ModelScheme(SCHEMES["W8A16"])

    def refusal(config: Mapping[str, Any], **changes: Any) -> str | None:
        return consumers(arch_of(config, **changes), "compressed-tensors", w8)["vLLM"]

    published = {**KIMI, "mla_use_nope": True, "hidden_size": 64, "intermediate_size": 64}
    published |= {"moe_intermediate_size": 64, "kv_lora_rank": 32, "v_head_dim": 8}
    published["linear_attn_config"] = {**KIMI["linear_attn_config"], "num_heads": 2}
    assert refusal(published) is None
    assert "no latent of queries and no biases" in str(refusal(published, q_lora_rank=32))
    assert "no latent of queries and no biases" in str(refusal(published, attention_bias=True))
    assert "reads mla_use_nope," in str(refusal(published, mla_use_nope=None))
    unstated = refusal(published, linear_attn_config=None, mla_use_nope=None, num_hidden_layers=6)
    assert "reads linear_attn_config and mla_use_nope," in str(unstated)


def test_vllm_finds_codes_of_mamba_mixers_of_granite_only_where_one_scheme_is_for_all() -> None:
    arch = arch_of(FAMILIES["granitemoehybrid"])
    w4, w8 = SCHEMES["W4A16_G32"], SCHEMES["W8A16"]
    assert consumers(arch, "compressed-tensors", ModelScheme(w8))["vLLM"] is None
    for linear, other in (("layers.0.mamba.dt", None), ("layers.1.ffn.down", w4)):
        mixed = ModelScheme(w8, exceptions=((linear, other),))
        assert "mixer" in str(consumers(arch, "compressed-tensors", mixed)["vLLM"])
    assert "mixer" in str(consumers(arch, "gptq", ModelScheme(w4))["vLLM"])
    plain = arch_of({**FAMILIES["granitemoehybrid"], "layer_types": ["attention"] * 4})
    assert consumers(plain, "gptq", ModelScheme(w4))["vLLM"] is None
    assert "no class" in str(consumers(arch_of(FAMILIES["bamba"]), "gptq", ModelScheme(w4))["vLLM"])


def test_vllm_on_a_cpu_computes_four_bits_of_mamba_mixers_in_whole_tiles_and_no_short_convolutions() -> None:
    scheme = ModelScheme(SCHEMES["W4A16_G32"])
    granite = FAMILIES["granitemoehybrid"]
    rows = 2 * 64 + 2 * 12 + 4
    ragged = consumers(arch_of(granite), "compressed-tensors", scheme)["vLLM on a CPU"]
    assert f"have {rows}" in str(ragged)
    whole = arch_of(granite, mamba_n_heads=16, mamba_d_state=8)
    assert consumers(whole, "compressed-tensors", scheme)["vLLM on a CPU"] is None
    lfm2 = consumers(arch_of(LFM2, block_multiple_of=32), "compressed-tensors", scheme)
    assert lfm2["vLLM"] is None
    assert "short convolutions" in str(lfm2["vLLM on a CPU"])
