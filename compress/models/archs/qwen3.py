"""Qwen3 dense models (arXiv 2505.09388): an RMSNorm over each query and key head, an explicit head_dim,
optional attention biases."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import windows_by_layer_type

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows=windows_by_layer_type,
    known_fields=frozenset(
        {"attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    ),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)

FAMILIES.add("qwen3", QWEN3)
