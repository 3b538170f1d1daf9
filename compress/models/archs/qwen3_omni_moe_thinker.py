"""The thinker of Qwen3-Omni (arXiv 2509.17765) without its talker, as its class in `transformers` saves it:
the text model is Qwen3's mixture of experts."""

from compress.models.archs.qwen3_omni_moe import TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

FAMILIES.add(
    "qwen3_omni_moe_thinker",
    wrapper(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        TEXT,
        in_memory={
            "visual.": "model.visual.",
            "audio_tower.": "model.audio_tower.",
            "model.": "model.language_model.",
        },
        untouched=("visual", "audio_tower"),
    ),
)
