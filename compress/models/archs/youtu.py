"""Youtu-LLM (Tencent, 2025): the latent attention of DeepSeek-V3 with one FFN in every layer."""

from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.module_names import LAYER_MODULES

FAMILIES.add(
    "youtu",
    Family(
        model_type="youtu",
        architecture="YoutuForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        latent=latent_of("rope_interleave"),
        implied=implies_own_code("YoutuConfig", "YoutuModel", "YoutuForCausalLM"),
        layer_modules={**LAYER_MODULES, **LATENT_MODULES},
        known_fields=frozenset(
            {"attention_bias", "rope_interleave", "auto_map", "embedding_initializer_range"}
        ),
        fixed_fields={"mlp_bias": False},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_interleave": True,
            "num_key_value_heads": 16,
            "max_position_embeddings": 131072,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
)
