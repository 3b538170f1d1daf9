"""Gated short convolutions in place of attention: the module against its formula, the facts that configs and
manifests state, and the same for the other recurrences' widths and the fields of Mamba-2."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.attention import CachedAttention, FullAttention
from compress.models.config_file import read_config
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.layer_manifest import layer_from_json, layer_to_json
from compress.models.mamba2 import Mamba2
from compress.models.pruning import Widths, resized, with_layers
from compress.models.recurrence import Recurrence
from compress.models.short_conv import ShortConv
from compress.models.short_conv_mixer import ShortConvMixer
from compress.untrusted.parse import Malformed, parse_json, read_json
from tests.support.tiny_source import tiny_shape, tiny_source

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
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **SIZES,
        **MAMBA,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 48,
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
}
RECURRENCES: dict[str, Recurrence] = {
    "conv": ShortConv.of(56, 3),
    "mamba": Mamba2(4, 2, 8, 12, 4, conv_bias=True),
    "delta": DeltaNet(4, 2, 8, 12, 4),
}
each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)
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
    return [idx for idx, layer in enumerate(arch.layers) if layer.recurrence is None]


def tiny_arch(recurrence: Recurrence) -> Arch:
    return tiny_source(layers=(tiny_shape(recurrence=recurrence, rope=None), tiny_shape())).arch


@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_the_module_is_its_formula(kernel_size: int) -> None:
    arch = tiny_arch(ShortConv.of(40, kernel_size))
    torch.manual_seed(0)
    mixer = Decoder(arch).requires_grad_(False).layers[0].conv
    assert isinstance(mixer, ShortConvMixer)
    x_BSD = torch.randn(2, 9, arch.hidden_size)
    out = mixer.heads(x_BSD, torch.arange(9), FullAttention(), layer_idx=0).double()
    b, c, x = (x_BSD.double() @ each.weight.double().T for each in (mixer.B, mixer.C, mixer.x))
    weight = mixer.conv.weight.double()
    for t in range(9):
        total = torch.zeros(2, 40, dtype=torch.float64)
        for back in range(min(kernel_size, t + 1)):
            total += weight[:, 0, kernel_size - 1 - back] * b[:, t - back] * x[:, t - back]
        torch.testing.assert_close(out[:, t], c[:, t] * total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_a_cached_decode_goes_on_where_it_ended(kernel_size: int) -> None:
    arch = tiny_arch(ShortConv.of(40, kernel_size))
    torch.manual_seed(0)
    decoder = Decoder(arch).requires_grad_(False)
    tokens_BS = torch.randint(arch.vocab_size, (2, 12))
    whole = decoder(tokens_BS, attention=FullAttention())
    cache = CachedAttention()
    cuts = (0, 1, 2, 7, 8, 12)
    pieces = [
        decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=2e-4)


@each_recurrence
def test_a_manifest_is_read_back_equal(recurrence: Recurrence) -> None:
    arch = tiny_arch(recurrence)
    facts, layers = json.loads(json.dumps(arch.to_json()))
    assert [recurrence.module in layer for layer in layers] == [True, False]
    assert Arch.from_json(facts, layers) == arch


@pytest.mark.parametrize("config", [LFM2, OLDER, *FAMILIES.values()], ids=["lfm2", "older", *FAMILIES])
def test_a_manifest_of_a_family_is_read_back_equal(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    assert attending(arch) in ([1], [1, 3])
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch


@each_recurrence
@pytest.mark.parametrize("value", [0, -1, "4", 2.0, True, 2**60, None], ids=repr)
def test_a_manifest_with_a_wrong_width_is_refused(recurrence: Recurrence, value: Any) -> None:
    layer = json.loads(json.dumps(layer_to_json(tiny_arch(recurrence).layers[0])))
    for name, right in layer[recurrence.module].items():
        if isinstance(right, bool) and value is True:
            continue
        if value == 0 and name == "key_dim" and isinstance(recurrence, ShortConv):
            continue
        widths = {**layer[recurrence.module], name: value}
        if value is None:
            del widths[name]
        with pytest.raises(StorageError, match=name):
            layer_from_json({**layer, recurrence.module: widths}, 0)


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


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_constants_are_spelled_only_where_a_reader_asks_for_them(name: str) -> None:
    assert parse_json(f"[{name}]", spells_constants=True) == [{"__float__": name}]
    with pytest.raises(Malformed, match=f"{name} is not a number of JSON"):
        parse_json(f"[{name}]")
    with pytest.raises(Malformed, match="too large"):
        parse_json("[1e999]", spells_constants=True)


@each_mamba
def test_the_dimension_of_a_head_fits_the_width_or_is_refused(config: dict[str, Any]) -> None:
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
