"""Ministral (8B of 2024): Mistral with windows by the type of a layer."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    if config.has("layer_types"):
        return {}
    kind = SLIDING if config.has("sliding_window") else FULL
    return {"layer_types": [kind] * config.integer("num_hidden_layers", 1, MAX_LAYERS)}


FAMILIES.add(
    "ministral",
    Family(
        model_type="ministral",
        architecture="MinistralForCausalLM",
        windows=windows_by_layer_type,
        implied=_implied,
        known_fields=frozenset({"sliding_window", "layer_types"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
)
