"""LLaVA-OneVision (arXiv 2408.03326): LLaVA 1.6 for images and videos; the text model is `qwen2`."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NEXT_NAMES, sized, wrapper

FAMILIES.add(
    "llava_onevision",
    wrapper(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        text_ties=True,
        **LLAVA_NEXT_NAMES,
    ),
)
