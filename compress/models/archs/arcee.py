"""Arcee (Arcee AI, 2025): Llama with an FFN without gates, whose activation is the squared relu."""

from dataclasses import replace

from compress.models.archs.llama import LLAMA
from compress.models.family import FAMILIES

FAMILIES.add(
    "arcee",
    replace(
        LLAMA,
        model_type="arcee",
        architecture="ArceeForCausalLM",
        gated=False,
        defaults={
            **LLAMA.defaults,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
    ),
)
