"""Facts of the tiny model and the recipe that whole-run tests use."""

from typing import Any

NUM_LAYERS = 3
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 3,
    "stages": [
        {"kind": "calibrate", "num_samples": 8, "seq_len": 32},
        {"kind": "quantize", "smooth": {"kind": "awq", "num_ratios": 4}},
        {"kind": "export"},
        {
            "kind": "validate",
            "num_samples": 4,
            "seq_len": 32,
            "latency": {
                "batch_sizes": [1],
                "prompt_tokens": 8,
                "output_tokens": 4,
                "repeats": 2,
                "warmups": 0,
            },
            "gates": {"ppl_ratio": 2.0},
        },
    ],
}
