"""OLMo (Ai2, arXiv 2402.00838): LayerNorm without weights. The 7B of 2024 clip what the linears of q, k and v
return (`clip_qkv`)."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import CAPS
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    clips = {"qkv_clip": config.number("clip_qkv", *CAPS)} if config.has("clip_qkv") else {}
    return {"norm": "layer", "unit_norms": True, "norm_eps": 1e-5, **clips}


FAMILIES.add(
    "olmo",
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        facts=_facts,
        outer_modules={name: disk for name, disk in OUTER_MODULES.items() if name != "norm"},
        layer_modules={
            name: disk for name, disk in LAYER_MODULES.items() if name not in ("attn_norm", "ffn_norm")
        },
        known_fields=frozenset({"attention_bias", "clip_qkv"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        },
    ),
)
