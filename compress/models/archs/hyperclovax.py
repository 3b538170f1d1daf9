"""HyperCLOVA X SEED Think (NAVER, 2025): Llama with factors of the embeddings, of attention scores, of what
each half of a layer adds and of the logits; and with a norm of the output of each half, if that is on."""

from typing import Any

from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

FACTORS = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _facts(config: Fields) -> dict[str, Any]:
    facts: dict[str, Any] = {ours: config.number(name, *SCALES) for ours, name in FACTORS.items()}
    if config.has("attention_multiplier"):
        facts["attn_scale"] = config.number("attention_multiplier", *SCALES)
    return {**facts, "block": "sandwich" if config.flag("use_post_norm") else "pre"}


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    ffn_bias="mlp_bias",
    heads_divide_hidden=True,
    facts=_facts,
    implied=implies_own_code("HyperCLOVAXConfig", "HyperCLOVAXModel", "HyperCLOVAXForCausalLM"),
    layer_modules={**LAYER_MODULES, "attn_post_norm": "post_norm1", "ffn_post_norm": "post_norm2"},
    known_fields=frozenset(
        {
            "attention_bias",
            "mlp_bias",
            "attention_multiplier",
            "use_post_norm",
            "auto_map",
            *FACTORS.values(),
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
        "logits_scaling": 1.0,
        "use_post_norm": True,
    },
)

FAMILIES.add("hyperclovax", HYPERCLOVAX)
