"""Gemma 3n with its vision and audio towers: the text model is `gemma3n_text`."""

from compress.models.archs.gemma3n_text import GEMMA3N_TEXT, altup_modules
from compress.models.archs.gemma4_text import layer_embed_modules
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "gemma3n",
    wrapper(
        "gemma3n",
        "Gemma3nForConditionalGeneration",
        GEMMA3N_TEXT,
        ties_by_default=True,
        layer_prefix="model.language_model.layers.",
        outer_modules={
            "embed": "model.language_model.embed_tokens",
            "norm": "model.language_model.norm",
            "head": "lm_head",
            **layer_embed_modules("model.language_model"),
            **altup_modules("model.language_model"),
        },
        untouched=("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"),
    ),
)
