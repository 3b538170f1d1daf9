"""LFM3 (Liquid AI, 2026): LFM2 with a norm of the output of each half of a layer, a gate of each head, and
layers whose attention has a window, each type of attention with a rope of its own."""

from typing import Any

from compress.models.archs.lfm2 import (
    CONV_FIELDS,
    CONV_FIXED,
    MODULES,
    OUTER,
    SPELLED,
    short_conv_of,
    standard_types,
)
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import HeadGate
from compress.models.layer_types import FULL, LINEAR, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import check_factors_of_types, check_plain_ropes
from compress.untrusted.fields import Fields

_GATE = "use_attention_gate"
_POST_NORMS = "use_sandwich_norm"


def _head_gate(config: Fields) -> HeadGate | None:
    return "sigmoid" if config.flag(_GATE) else None


def _facts(config: Fields) -> dict[str, Any]:
    return {"block": "sandwich" if config.flag(_POST_NORMS) else "pre"}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling. Where a config states none, every fourth has
    full attention, and those half-way between them have a window."""
    check_factors_of_types(config)
    check_plain_ropes(config, (FULL, SLIDING))
    if config.has("layer_types"):
        return standard_types(config)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = {0: SLIDING, 2: FULL}
    types = [kinds.get(idx % 4, LINEAR) for idx in range(num_layers)]
    return {"layer_types": [LINEAR, *types[1:]]}


LFM3 = Family(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_gate=_head_gate,
    windows=windows_by_layer_type,
    recurrence=short_conv_of,
    facts=_facts,
    implied=_implied,
    spelled=SPELLED,
    aliases={"norm_eps": "rms_norm_eps"},
    outer_modules=OUTER,
    layer_modules={
        **MODULES,
        **{name: LAYER_MODULES[name] for name in ("attn.o", "attn.q_norm", "attn.k_norm")},
        "attn.head_gate": "self_attn.gate_proj",
        "attn_post_norm": "post_operator_norm",
        "ffn_post_norm": "post_ffn_norm",
    },
    in_memory_inside={"self_attn.gate_proj": "self_attn.g_proj"},
    known_fields=CONV_FIELDS
    | {_GATE, _POST_NORMS, "attention_bias", "sliding_window", "partial_rotary_factor"},
    fixed_fields=CONV_FIXED,
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "conv_L_cache": 7,
        "sliding_window": 256,
        _GATE: True,
        _POST_NORMS: True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        },
    },
)

FAMILIES.add("lfm3", LFM3)
