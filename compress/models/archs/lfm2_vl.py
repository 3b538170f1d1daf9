"""LFM2-VL (Liquid AI, arXiv 2511.23404): the text model is LFM2."""

from compress.models.archs.lfm2 import LFM2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_MODEL_NAMES, wrapper

OUTER = {**LLAVA_MODEL_NAMES["outer_modules"], "norm": "model.language_model.embedding_norm"}

FAMILIES.add(
    "lfm2_vl",
    wrapper(
        "lfm2_vl",
        "Lfm2VlForConditionalGeneration",
        LFM2,
        ties_by_default=True,
        **{**LLAVA_MODEL_NAMES, "outer_modules": OUTER},
    ),
)
