"""Llama 1 to 3.x (arXiv 2302.13971, 2407.21783): the decoder the others are described against."""

from compress.models.family import FAMILIES, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    ffn_bias="mlp_bias",
    heads_divide_hidden=True,
    known_fields=frozenset({"attention_bias", "mlp_bias"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
)

FAMILIES.add("llama", LLAMA)
