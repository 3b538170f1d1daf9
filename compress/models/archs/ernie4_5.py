"""ERNIE 4.5, the dense model (Baidu): Llama with one switch for all biases; neighbouring dimensions of a head
rotate as a pair."""

from compress.models.family import FAMILIES, Family

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    qkv_bias="use_bias",
    o_bias="use_bias",
    ffn_bias="use_bias",
    interleaved_rotary=True,
    known_fields=frozenset({"use_bias"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
)

FAMILIES.add("ernie4_5", ERNIE4_5)
