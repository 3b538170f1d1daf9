"""Ovis 2 (arXiv 2405.20797): images are looked up in a table of their own; the text model is `qwen2`."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, sized, wrapper

_PARTS = ("vision_tower", "visual_embeddings_table")

FAMILIES.add(
    "ovis2",
    wrapper(
        "ovis2",
        "Ovis2ForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        ties_by_default=True,
        **{**LANGUAGE_MODEL_NAMES, "untouched": tuple(f"model.{part}" for part in _PARTS)},
    ),
)
