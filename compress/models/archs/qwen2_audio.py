"""Qwen2-Audio (arXiv 2407.10759): the text model is `qwen2`, next to the encoder of Whisper."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_NAMES, sized, wrapper

FAMILIES.add(
    "qwen2_audio",
    wrapper(
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        own_head=True,
        **AUDIO_NAMES,
    ),
)
