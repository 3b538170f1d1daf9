"""Qwen3-ASR (arXiv 2601.21337) as `transformers` has it: the text model is `qwen3`, next to the audio
tower of Qwen3-Omni."""

from compress.models.archs.lighton_ocr import QWEN3_INSIDE
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_MODEL_NAMES, wrapper

FAMILIES.add(
    "qwen3_asr",
    wrapper(
        "qwen3_asr",
        "Qwen3ASRForConditionalGeneration",
        QWEN3_INSIDE,
        ties_by_default=True,
        **AUDIO_MODEL_NAMES,
    ),
)
