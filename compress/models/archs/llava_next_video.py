"""LLaVA-NeXT-Video (2024): LLaVA 1.6 with frames of videos; the text model is `llama`, `mistral` or
`qwen2`."""

from compress.models.archs.llava import LLAMA_7B, MISTRAL_7B
from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NEXT_NAMES, sized, wrapper

_RESAMPLER = "vision_resampler"
_NAMES = {
    **LLAVA_NEXT_NAMES,
    "in_memory": {**LLAVA_NEXT_NAMES["in_memory"], f"{_RESAMPLER}.": f"model.{_RESAMPLER}."},
    "untouched": (*LLAVA_NEXT_NAMES["untouched"], _RESAMPLER),
}

FAMILIES.add(
    "llava_next_video",
    wrapper(
        "llava_next_video",
        "LlavaNextVideoForConditionalGeneration",
        LLAMA_7B,
        MISTRAL_7B,
        sized(QWEN2, **DEFAULT_SIZES),
        text_ties=True,
        **_NAMES,
    ),
)
