"""LLaVA 1.6 (LLaVA-NeXT, 2024): LLaVA whose images come in several sizes, with an embedding that ends a row
of one; the text model is `llama`, `mistral` or `qwen2`."""

from compress.models.archs.llava import LLAMA_7B, MISTRAL_7B
from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NEXT_NAMES, sized, wrapper

FAMILIES.add(
    "llava_next",
    wrapper(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        LLAMA_7B,
        MISTRAL_7B,
        sized(QWEN2, **DEFAULT_SIZES),
        **LLAVA_NEXT_NAMES,
    ),
)
