"""Gemma 3 with its vision tower (arXiv 2503.19786): the text model is `gemma3_text`."""

from compress.models.archs.gemma3_text import GEMMA3_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add(
    "gemma3",
    wrapper(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        GEMMA3_TEXT,
        ties_by_default=True,
        **LLAVA_NAMES,
    ),
)
