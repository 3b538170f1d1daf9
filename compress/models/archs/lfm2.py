"""LFM2 (Liquid AI, arXiv 2511.23404): most layers have a gated short convolution in place of attention; the
others have attention with norms of each head's q and k."""

from collections.abc import Mapping
from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, LINEAR
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.models.recurrence import Recurrence
from compress.models.short_conv import ShortConv
from compress.untrusted.fields import Fields

_CONV = "conv"
_ATTENDING = "full_attn_idxs"
_HEADS = "num_heads"
"""Another name of `num_attention_heads`, which `transformers` does not read."""
_SIZE = "block_ff_dim"
"""An older name of `intermediate_size`, which counts where a config has it."""
_ADJUSTS = "block_auto_adjust_ff_dim"
_ADJUSTED = frozenset({_ADJUSTS, "block_ffn_dim_multiplier", "block_multiple_of"})
CONV_FIELDS = frozenset({"layer_types", "conv_L_cache", "norm_eps"})
CONV_FIXED = {"conv_bias": False, "hidden_act": "silu"}
SPELLED = {"rms_norm_eps": "norm_eps"}
ALIASES = {"tie_word_embeddings": "tie_embedding"}
OUTER = {**OUTER_MODULES, "norm": "model.embedding_norm"}
MODULES = {
    **LAYER_MODULES,
    "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
    "conv.B": "conv.in_proj",
    "conv.C": "conv.in_proj",
    "conv.x": "conv.in_proj",
    "conv.conv": "conv.conv",
    "conv.o": "conv.out_proj",
}
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "conv_L_cache": 3,
}


def short_conv_of(config: Fields) -> Recurrence:
    """Return the widths of the short convolutions of a config."""
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    return ShortConv.of(hidden_size, config.integer("conv_L_cache", 1, MAX_SIZE))


def standard_types(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling."""
    stated = config.texts("layer_types")
    return {"layer_types": [LINEAR if each == _CONV else each for each in stated]}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, of which older configs state those with attention, and the width of an
    FFN, of which a config may state one and a half times as many channels as it has, to be rounded up."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    if config.integer(_HEADS, 1, MAX_SIZE, default=num_heads) != num_heads:
        raise config.wrong(_HEADS, config.integer(_HEADS, 1, MAX_SIZE), f"num_attention_heads = {num_heads}")
    if config.has("layer_types"):
        types = standard_types(config)
    else:
        every = range(num_layers)
        attending = config.integers(_ATTENDING, 0, MAX_LAYERS) if config.has(_ATTENDING) else every
        types = {"layer_types": [FULL if idx in attending else LINEAR for idx in every]}
    return {**types, "intermediate_size": _ffn_size(config)}


def _ffn_size(config: Fields) -> int:
    size = config.integer(_SIZE if config.has(_SIZE) else "intermediate_size", 1, MAX_SIZE)
    if config.flag(_ADJUSTS):
        size = int(2 * size / 3)
        size = int(config.number("block_ffn_dim_multiplier", *SCALES, default=1.0) * size)
        multiple = config.integer("block_multiple_of", 1, MAX_SIZE)
        size = -(-size // multiple) * multiple
    return size


def _stated_size(config: Fields, size: int) -> dict[str, Any]:
    """Return the fields of another width than the config states."""
    if _ffn_size(config) == size:
        return {}
    older = {_SIZE: size} if config.has(_SIZE) else {}
    return {"intermediate_size": size, _ADJUSTS: False, **older}


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    qk_norm=True,
    recurrence=short_conv_of,
    implied=_implied,
    dense_fields=_stated_size,
    spelled=SPELLED,
    aliases=ALIASES,
    outer_modules=OUTER,
    layer_modules=MODULES,
    known_fields=CONV_FIELDS | _ADJUSTED | {_ATTENDING, _SIZE, _HEADS},
    fixed_fields=CONV_FIXED,
    defaults={
        **DEFAULTS,
        "intermediate_size": 12288,
        _ADJUSTS: True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
)

FAMILIES.add("lfm2", LFM2)
