"""LFM3-VL (Liquid AI, 2026): the text model is LFM3."""

from compress.models.archs.lfm2_vl import OUTER
from compress.models.archs.lfm3 import LFM3
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_MODEL_NAMES, wrapper

FAMILIES.add(
    "lfm3_vl",
    wrapper(
        "lfm3_vl",
        "Lfm3VlForConditionalGeneration",
        LFM3,
        ties_by_default=True,
        **{**LLAVA_MODEL_NAMES, "outer_modules": OUTER},
    ),
)
