"""Seed-OSS (ByteDance, 2025): Llama with a bias on q, k and v, and a switch of its own for one on o."""

from compress.models.family import FAMILIES, Family

FAMILIES.add(
    "seed_oss",
    Family(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        ffn_bias="mlp_bias",
        known_fields=frozenset(  # dropout is for training only
            {"attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout"}
        ),
        fixed_fields={"pretraining_tp": 1},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "max_position_embeddings": 524288,
        },
    ),
)
