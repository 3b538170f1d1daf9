"""Music Flamingo (NVIDIA, arXiv 2511.10289) as `transformers` has it: the text model is `qwen2`, next to the
encoder of Whisper, whose frames have a rope of time."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_NAMES, sized, wrapper

FAMILIES.add(
    "musicflamingo",
    wrapper(
        "musicflamingo",
        "MusicFlamingoForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        own_head=True,
        **AUDIO_NAMES,
    ),
)
