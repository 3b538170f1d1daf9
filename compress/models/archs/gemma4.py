"""Gemma 4 with its vision and audio towers: the text model is `gemma4_text`."""

from compress.models.archs.gemma4_text import GEMMA4_TEXT, layer_embed_modules
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "gemma4",
    wrapper(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        GEMMA4_TEXT,
        ties_by_default=True,
        layer_prefix="model.language_model.layers.",
        outer_modules={
            "embed": "model.language_model.embed_tokens",
            "norm": "model.language_model.norm",
            "head": "lm_head",
            **layer_embed_modules("model.language_model"),
        },
        untouched=("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"),
    ),
)
