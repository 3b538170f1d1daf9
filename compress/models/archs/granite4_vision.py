"""Granite 4 Vision (IBM, 2026): the text model is Granite, to some of whose layers features of images are
added."""

from dataclasses import replace

from compress.models.archs.granite import GRANITE
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, sized, wrapper

_SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT = sized(replace(GRANITE, model_type="granite4_vision_text"), **_SIZES, intermediate_size=11008)
_PARTS = ("vision_tower", "layerwise_projectors", "spatial_projectors", "image_newline")

FAMILIES.add(
    "granite4_vision",
    wrapper(
        "granite4_vision",
        "Granite4VisionForConditionalGeneration",
        _TEXT,
        replace(_TEXT, model_type="granite"),
        layers_are_numbered=True,
        **{**LANGUAGE_MODEL_NAMES, "untouched": tuple(f"model.{part}" for part in _PARTS)},
    ),
)
