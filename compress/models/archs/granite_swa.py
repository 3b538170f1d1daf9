"""Granite with sliding windows (IBM, 2026): Granite 3 whose layers see a window but every fourth, with an
attention sink for each head. Layers may encode no positions."""

from dataclasses import replace
from typing import Any

from compress.models.arch import MAX_LAYERS, THETAS
from compress.models.archs.granite import GRANITE
from compress.models.family import FAMILIES
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.untrusted.fields import Fields

THETA_BY_LAYER = "layer_rope_theta"
FIELDS = frozenset({"sliding_window", "layer_types", THETA_BY_LAYER})


def types_of_layers(config: Fields) -> dict[str, Any]:
    """Return the `layer_types` of a config that states none."""
    if config.has("layer_types"):
        return {}
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {"layer_types": [SLIDING if idx % 4 else FULL for idx in range(num_layers)]}


def rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those whose base frequency is not 0.

    Raises:
        UnsupportedArch: a layer has another base frequency than the model.
    """
    if not config.has(THETA_BY_LAYER):
        return [True] * num_layers
    stated = config.numbers(THETA_BY_LAYER, 0, THETAS[1])
    rope = config.fields("rope_parameters", default={})
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", *THETAS)
    if len(stated) < num_layers or set(stated) - {0, theta}:
        raise config.wrong(THETA_BY_LAYER, stated, f"{num_layers} times {theta:g}, the model's own, or 0")
    return [each != 0 for each in stated[:num_layers]]


FAMILIES.add(
    "granite_swa",
    replace(
        GRANITE,
        model_type="granite_swa",
        architecture="GraniteSWAForCausalLM",
        windows=windows_by_layer_type,
        rotated_layers=rotated_layers,
        implied=types_of_layers,
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
