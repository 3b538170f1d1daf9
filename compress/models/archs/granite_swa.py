"""Granite with sliding windows (IBM, 2026): Granite 3 with an attention sink for each head, whose layers see
a window, but for every fourth. Layers may encode no positions."""

from dataclasses import replace
from typing import Any

from compress.models.archs.granite import GRANITE
from compress.models.family import FAMILIES
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, THETAS
from compress.untrusted.fields import Fields

THETA_BY_LAYER = "layer_rope_theta"
FIELDS = frozenset({"sliding_window", "layer_types", THETA_BY_LAYER})


def implied(config: Fields) -> dict[str, Any]:
    """Return the `layer_types` of a config that states none, and the rope of layers that state its base
    frequency for themselves."""
    found: dict[str, Any] = {}
    if not config.has("layer_types"):
        num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
        found["layer_types"] = [SLIDING if idx % 4 else FULL for idx in range(num_layers)]
    thetas = set(_thetas(config)) - {0}
    if thetas:
        rope = config.mapping("rope_parameters", default=config.mapping("rope_scaling", default={}))
        found["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": min(thetas)}
    return found


def rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those whose base frequency is not 0.

    Raises:
        UnsupportedArch: layers have several base frequencies, or fewer are stated than there are layers.
    """
    stated = _thetas(config)
    if not config.has(THETA_BY_LAYER):
        return [True] * num_layers
    if len(stated) < num_layers or len(set(stated) - {0}) > 1:
        raise config.wrong(THETA_BY_LAYER, stated, f"{num_layers} numbers, of which each is the same or 0")
    return [each != 0 for each in stated[:num_layers]]


def _thetas(config: Fields) -> list[float]:
    return config.numbers(THETA_BY_LAYER, 0, THETAS[1]) if config.has(THETA_BY_LAYER) else []


FAMILIES.add(
    "granite_swa",
    replace(
        GRANITE,
        model_type="granite_swa",
        architecture="GraniteSWAForCausalLM",
        windows=windows_by_layer_type,
        rotated_layers=rotated_layers,
        implied=implied,
        facts=lambda config: {**GRANITE.facts(config), "attn_sinks": True},
        known_fields=GRANITE.known_fields | FIELDS,
        defaults={
            **GRANITE.defaults,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "intermediate_size": 8192,
            "max_position_embeddings": 8192,
            "sliding_window": 128,
        },
    ),
)
