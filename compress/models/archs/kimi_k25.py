"""Kimi K2.5 and K2.6 (Moonshot AI, 2026) with their vision tower: the text model is DeepSeek-V3, also by its
older name `kimi_k2`."""

from compress.models.archs.deepseek_v3 import DEEPSEEK_V3
from compress.models.archs.kimi_k2 import KIMI_K2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add(
    "kimi_k25",
    wrapper(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        DEEPSEEK_V3,
        KIMI_K2,
        ties_by_default=True,
        other_names=("KimiK25ForConditionalGeneration",),
        **{
            **LLAVA_NAMES,
            # `transformers` saves some names of its modules in memory.
            "untouched": ("vision_tower", "mm_projector", "model.vision_tower", "model.mm_projector"),
        },
    ),
)
