"""GLM-4 and GLM-Z1 of 2025 (0414): GLM-4 of 2024 with a norm of the output of each half of a layer."""

from compress.models.family import FAMILIES, Family
from compress.models.module_names import LAYER_MODULES, STACKED_GATE_UP

_NORMS = {"attn_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    qkv_bias="attention_bias",
    facts=lambda config: {"block": "sandwich"},
    interleaved_rotary=True,
    layer_modules={**LAYER_MODULES, **STACKED_GATE_UP, **_NORMS},
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
)

FAMILIES.add("glm4", GLM4)
