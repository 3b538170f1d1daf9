"""Llama 4 (Meta, 2025) with its vision tower, Scout and Maverick: the text model is `llama4_text`."""

from compress.models.archs.llama4_text import LLAMA4_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "llama4",
    wrapper(
        "llama4",
        "Llama4ForConditionalGeneration",
        LLAMA4_TEXT,
        layer_prefix="language_model.model.layers.",
        outer_modules={
            "embed": "language_model.model.embed_tokens",
            "norm": "language_model.model.norm",
            "head": "language_model.lm_head",
        },
        untouched=("vision_model", "multi_modal_projector"),
    ),
)
