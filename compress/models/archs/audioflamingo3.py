"""Audio Flamingo 3 (NVIDIA, arXiv 2507.08128) as `transformers` has it: the text model is `qwen2`, next to
the encoder of Whisper."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_NAMES, sized, wrapper

FAMILIES.add(
    "audioflamingo3",
    wrapper(
        "audioflamingo3",
        "AudioFlamingo3ForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        own_head=True,
        **AUDIO_NAMES,
    ),
)
