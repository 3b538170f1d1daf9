"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): biases on q, k and v only; sliding windows on some layers
when switched on."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import windows_by_layer_type

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    windows=windows_by_layer_type,
    known_fields=frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)

DEFAULT_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Sizes of models of `qwen2` and `qwen3` whose configs state none, inside of others."""

FAMILIES.add("qwen2", QWEN2)
