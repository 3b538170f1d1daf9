"""Jais 2 (Inception, MBZUAI): LayerNorm with a bias, biases of all linears, and an FFN without gates, whose
activation is the squared relu."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True}


FAMILIES.add(
    "jais2",
    Family(
        model_type="jais2",
        architecture="Jais2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        gated=False,
        heads_divide_hidden=True,
        facts=_facts,
        spelled={"rms_norm_eps": "layer_norm_eps"},
        known_fields=frozenset({"attention_bias", "mlp_bias", "layer_norm_eps"}),
        defaults={
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
)
