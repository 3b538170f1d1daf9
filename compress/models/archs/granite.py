"""Granite 3 (IBM): Llama with a factor of the embeddings, of attention scores, of what each half of a layer
adds, and a divisor of the logits."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "embed_scale": config.number("embedding_multiplier", *SCALES),
        "residual_scale": config.number("residual_multiplier", *SCALES),
        "attn_scale": config.number("attention_multiplier", *SCALES),
        "logit_scale": 1 / config.number("logits_scaling", 1e-6, SCALES[1]),
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    ffn_bias="mlp_bias",
    facts=_facts,
    known_fields=frozenset(
        {
            "attention_bias",
            "mlp_bias",
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        }
    ),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)

FAMILIES.add("granite", GRANITE)
