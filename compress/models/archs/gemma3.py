"""Gemma 3 with its vision tower (arXiv 2503.19786): the text model is `gemma3_text`, whose cap of logits the
class of `transformers` around it does not apply."""

from dataclasses import replace

from compress.models.archs.gemma3_text import GEMMA3_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

_CAP = "final_logit_softcapping"
_TEXT = replace(
    GEMMA3_TEXT,
    known_fields=GEMMA3_TEXT.known_fields - {_CAP},
    fixed_fields={**GEMMA3_TEXT.fixed_fields, _CAP: None},
)

GEMMA3 = wrapper(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    _TEXT,
    ties_by_default=True,
    **LLAVA_NAMES,
)

FAMILIES.add("gemma3", GEMMA3)
