"""Gemma 1 (arXiv 2403.08295): norms store w - 1, embeddings are scaled by the root of the hidden size."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm_offset": 1.0, "embed_scale": config.integer("hidden_size", 1, MAX_SIZE) ** 0.5}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the activation: the first releases name the exact GELU and were trained with the other."""
    return {"hidden_act": "gelu_pytorch_tanh"} if config.text("hidden_act") == "gelu" else {}


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    facts=_facts,
    implied=_implied,
    known_fields=frozenset({"attention_bias"}),
    fixed_fields={"use_bidirectional_attention": False},
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
)

FAMILIES.add("gemma", GEMMA)
