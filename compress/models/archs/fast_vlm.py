"""FastVLM (Apple, arXiv 2412.13303): the text model is `qwen2`. Its vision tower is one of the package timm,
which `transformers` needs to load it."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_MODEL_NAMES, sized, wrapper

FAMILIES.add(
    "fast_vlm",
    wrapper(
        "fast_vlm",
        "FastVlmForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        text_ties=True,
        **LLAVA_MODEL_NAMES,
    ),
)
