"""LLaVA-OneVision (arXiv 2408.03326): LLaVA 1.6 for images and videos; the text model is `qwen2`."""

from compress.models.archs.qwen2 import QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NEXT_NAMES, wrapper

FAMILIES.add(
    "llava_onevision",
    wrapper(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        QWEN2,
        text_ties=True,
        **LLAVA_NEXT_NAMES,
    ),
)
