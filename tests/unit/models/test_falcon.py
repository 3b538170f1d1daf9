"""Falcon: turns of rows by head of keys, names of norms, and what no config of the family states."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.family import family_of, family_of_arch
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES

CONFIG: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "dtype": "float32",
}
BEFORE_BOTH = ["input_layernorm", "post_attention_layernorm"]
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


def arch_of(**changes: Any) -> Arch:
    config = {**CONFIG, **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "norms"),
    [
        ({}, 1, ["input_layernorm"]),
        ({"multi_query": False}, 8, ["input_layernorm"]),
        ({"parallel_attn": False}, 1, BEFORE_BOTH),
        ({"parallel_attn": False, "num_ln_in_parallel_attn": 2}, 1, BEFORE_BOTH),
        ({"parallel_attn": None}, 1, BEFORE_BOTH),
        ({"multi_query": None}, 8, ["input_layernorm"]),
        ({"new_decoder_architecture": None}, 1, ["input_layernorm"]),
        ({**NEW, "multi_query": None}, 2, ["ln_attn", "ln_mlp"]),
        (NEW, 2, ["ln_attn", "ln_mlp"]),
        ({**NEW, "num_ln_in_parallel_attn": 1}, 2, ["input_layernorm"]),
    ],
)
def test_heads_of_keys_and_names_of_norms(changes: dict[str, Any], kv_heads: int, norms: list[str]) -> None:
    arch = arch_of(**changes)
    layer = arch.layers[0]
    assert (layer.num_kv_heads, layer.intermediate_size) == (kv_heads, 256)
    assert layer.num_turns(("attn.q", "attn.k", "attn.v")) == kv_heads
    family = family_of_arch(arch)
    canonical = ["attn_norm", "ffn_norm"][: arch.num_norms(layer)]
    names = [family.to_disk(f"layers.1.{norm}") for norm in canonical]
    assert names == [f"transformer.h.1.{norm}" for norm in norms]
    assert Arch.from_json(*arch.to_json()) == arch
    written = family.write_config(arch)
    assert family.read_config(written).replace(config={}) == arch.replace(config={})
    theirs = transformers.FalconModel(transformers.FalconConfig(**{**CONFIG, **changes})).h[1]
    assert {name for name, _ in theirs.named_children() if "layernorm" in name or "ln" in name} == set(norms)
    attention = theirs.self_attention
    assert attention.query_key_value.out_features == (8 + 2 * kv_heads) * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**NEW, "parallel_attn": False}, "parallel_attn"),
        ({**NEW, "parallel_attn": None}, "parallel_attn"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map"),
    ],
)
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def test_a_config_that_is_written_states_no_size_of_a_head() -> None:
    arch = arch_of(**NEW, head_dim=8)
    written = family_of_arch(arch).write_config(arch)
    assert "head_dim" not in written
    assert written["num_kv_heads"] == 2


def test_vllm_loads_ffns_of_four_times_the_hidden_size() -> None:
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"])
    for size, loads in ((256, True), (128, False)):
        consumers = FORMATS.get("compressed-tensors").consumers(arch_of(ffn_hidden_size=size), scheme)
        assert {each.name: each.loads for each in consumers}["vLLM"] == loads


def test_heads_that_no_field_states_are_refused() -> None:
    arch = arch_of()
    other = arch.replace(layers=tuple(replace(layer, num_kv_heads=2) for layer in arch.layers))
    with pytest.raises(UnsupportedArch, match="2 heads of keys for 8 of queries"):
        family_of_arch(other).write_config(other)
