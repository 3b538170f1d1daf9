"""Persimmon (Adept, 2023): LayerNorm with a bias, also of each head of queries and keys before it rotates, of
which a part does. All linears have biases, and FFNs have no gates and the squared relu. On disk the rows of
queries, keys and values take turns by head."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields

_NORMS = "qk_layernorm"
_STACKED = "self_attn.query_key_value"


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True, "qk_norm_bias": config.flag(_NORMS)}


def _implied(config: Fields) -> dict[str, Any]:
    """Return as many heads of keys and values as of queries, whatever is stated."""
    return {"num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE)}


FAMILIES.add(
    "persimmon",
    Family(
        model_type="persimmon",
        architecture="PersimmonForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        qk_norm=_NORMS,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        facts=_facts,
        implied=_implied,
        spelled={"rms_norm_eps": "layer_norm_eps"},
        rows_in_turns=frozenset({_STACKED}),
        outer_modules={**OUTER_MODULES, "norm": "model.final_layernorm"},
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), _STACKED),
            "attn.q_norm": "self_attn.q_layernorm",
            "attn.k_norm": "self_attn.k_layernorm",
            "attn.o": "self_attn.dense",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
        known_fields=frozenset({"layer_norm_eps", "partial_rotary_factor", _NORMS}),
        defaults={
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 16384,
            _NORMS: True,
        },
    ),
)
