"""OLMo 3 (Ai2): OLMo 2 with a window in three of four layers, whose rope is not rescaled."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import every_nth_full, rope_by_layer_type, windows_by_layer_type
from compress.models.limits import THETAS
from compress.models.module_names import POST_NORM_MODULES
from compress.untrusted.fields import Fields

_THETA = 500000.0


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers and their ropes. A `rope_theta` of the config is that of full attention
    only, as in `transformers`."""
    theta = config.number("rope_theta", *THETAS, default=_THETA)
    return every_nth_full(config, 4) | rope_by_layer_type(config, theta, _THETA)


FAMILIES.add(
    "olmo3",
    Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=windows_by_layer_type,
        facts=lambda config: {"block": "post", "whole_qk_norm": True},
        implied=_implied,
        layer_modules=POST_NORM_MODULES,
        known_fields=frozenset({"attention_bias", "sliding_window", "layer_types"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
        },
    ),
)
