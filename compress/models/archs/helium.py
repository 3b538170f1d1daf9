"""Helium 1 (Kyutai, 2025): Llama whose neighbouring dimensions of a head rotate as a pair."""

from compress.models.family import FAMILIES, Family

FAMILIES.add(
    "helium",
    Family(
        model_type="helium",
        architecture="HeliumForCausalLM",
        qkv_bias="attention_bias",
        ffn_bias="mlp_bias",
        heads_span_hidden=True,
        interleaved_rotary=True,
        known_fields=frozenset({"attention_bias", "mlp_bias"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
    ),
)
