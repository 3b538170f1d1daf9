"""Code World Model (Meta, arXiv 2510.02387): Llama with a window in three of four layers, of which the first
of each four sees everything."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields

_PERIOD = 4


def _implied(config: Fields) -> dict[str, Any]:
    if config.has("layer_types"):
        return {}
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {"layer_types": [SLIDING if idx % _PERIOD else FULL for idx in range(num_layers)]}


FAMILIES.add(
    "cwm",
    Family(
        model_type="cwm",
        architecture="CwmForCausalLM",
        ffn_bias="mlp_bias",
        windows=windows_by_layer_type,
        implied=_implied,
        known_fields=frozenset({"mlp_bias", "sliding_window", "layer_types"}),
        fixed_fields={"attention_bias": False},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
)
