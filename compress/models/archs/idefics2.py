"""Idefics 2 (Hugging Face, arXiv 2405.02246): the text model is `mistral`. Its vision tower stays as it is,
and so does the connector, whose perceiver turns an image into a few embeddings."""

from compress.models.archs.idefics3 import IDEFICS3
from compress.models.archs.llava import MISTRAL_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "idefics2",
    wrapper(
        "idefics2",
        "Idefics2ForConditionalGeneration",
        MISTRAL_7B,
        layer_prefix=IDEFICS3.layer_prefix,
        outer_modules=IDEFICS3.outer_modules,
        untouched=IDEFICS3.untouched,
    ),
)
