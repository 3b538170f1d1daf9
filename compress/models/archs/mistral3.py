"""Mistral Small 3.1 and 4 and Ministral 3 with their vision tower: the text model is `mistral`, `mistral4` or
`ministral3`."""

from compress.models.archs.ministral3 import MINISTRAL3
from compress.models.archs.mistral import MISTRAL
from compress.models.archs.mistral4 import MISTRAL4
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add(
    "mistral3",
    wrapper(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        MISTRAL,
        MINISTRAL3,
        MISTRAL4,
        **LLAVA_NAMES,
    ),
)
