"""The thinker of Qwen2.5-Omni (arXiv 2503.20215) without its talker, as its class in `transformers` saves it:
the text model is Qwen2."""

from compress.models.archs.qwen2_5_omni import TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "qwen2_5_omni_thinker",
    wrapper(
        "qwen2_5_omni_thinker",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        TEXT,
        in_memory={
            "visual.": "model.visual.",
            "audio_tower.": "model.audio_tower.",
            "model.": "model.language_model.",
        },
        untouched=("visual", "audio_tower"),
    ),
)
