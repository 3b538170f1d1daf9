"""Aria (Rhymes AI, arXiv 2410.05993): the text model is `aria_text`, with experts in every layer."""

from compress.models.archs.aria_text import ARIA_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add("aria", wrapper("aria", "AriaForConditionalGeneration", ARIA_TEXT, **LLAVA_NAMES))
