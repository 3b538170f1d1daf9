"""Perception LM (Meta, arXiv 2504.13180): the text model is `llama`. Its vision tower is one of the package
timm, which `transformers` needs to load it."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_MODEL_NAMES, wrapper

FAMILIES.add(
    "perception_lm",
    wrapper("perception_lm", "PerceptionLMForConditionalGeneration", LLAMA_7B, **LLAVA_MODEL_NAMES),
)
