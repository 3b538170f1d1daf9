"""EXAONE 4.0 (arXiv 2507.11407): norms after the halves of a layer and of each head of q and k; of the 32B
model, the layers without a window do not encode positions."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import every_nth_full, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.models.module_names import POST_NORM_MODULES
from compress.untrusted.fields import Fields


def types_of_layers(config: Fields) -> dict[str, Any]:
    """Return the `layer_types` of a config, where it states none those of its pattern."""
    if config.has("layer_types"):
        return {}
    return every_nth_full(config, config.integer("sliding_window_pattern", 1, MAX_LAYERS))


def layers_with_rope(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those with a window, or all of a model without one."""
    windows = windows_by_layer_type(config, num_layers)
    return [not config.has("sliding_window") or window is not None for window in windows]


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    qk_norm=True,
    windows=windows_by_layer_type,
    rotated_layers=layers_with_rope,
    facts=lambda config: {"block": "post"},
    implied=types_of_layers,
    layer_modules=POST_NORM_MODULES,
    known_fields=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)

FAMILIES.add("exaone4", EXAONE4)
