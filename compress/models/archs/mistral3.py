"""Mistral Small 3.1 and Ministral 3 with their vision tower: the text model is `mistral` or `ministral3`."""

from compress.models.archs.ministral3 import MINISTRAL3
from compress.models.archs.mistral import MISTRAL
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add(
    "mistral3",
    wrapper(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        MISTRAL,
        MINISTRAL3,
        **LLAVA_NAMES,
    ),
)
