"""Minitron and Nemotron-Mini (NVIDIA, arXiv 2407.14679): LayerNorm with a bias whose stored weight is w - 1,
a part of each head rotated, and an FFN without gates, whose activation is the squared relu."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True, "norm_offset": 1.0}


FAMILIES.add(
    "nemotron",
    Family(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        gated=False,
        facts=_facts,
        spelled={"rms_norm_eps": "norm_eps"},
        known_fields=frozenset({"attention_bias", "mlp_bias", "norm_eps", "partial_rotary_factor"}),
        defaults={
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4096,
        },
    ),
)
