"""GLM-4 of 2024 (arXiv 2406.12793): half of each head rotates, neighbours as pairs; gate and up are stacked;
biases on q, k and v."""

from compress.models.family import FAMILIES, Family
from compress.models.module_names import LAYER_MODULES, STACKED_GATE_UP

FAMILIES.add(
    "glm",
    Family(
        model_type="glm",
        architecture="GlmForCausalLM",
        qkv_bias="attention_bias",
        interleaved_rotary=True,
        layer_modules={**LAYER_MODULES, **STACKED_GATE_UP},
        known_fields=frozenset({"attention_bias", "partial_rotary_factor"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1.5625e-7,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_bias": True,
        },
    ),
)
