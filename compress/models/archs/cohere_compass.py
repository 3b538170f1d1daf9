"""North Micro Vision (Cohere, 2026): the text model is `cohere_compass_text`, next to the vision tower of
Qwen3-VL."""

from compress.models.archs.cohere_compass_text import COHERE_COMPASS_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

FAMILIES.add(
    "cohere_compass",
    wrapper(
        "cohere_compass",
        "CohereCompassForConditionalGeneration",
        COHERE_COMPASS_TEXT,
        **LANGUAGE_MODEL_NAMES,
    ),
)
