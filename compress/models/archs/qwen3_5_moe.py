"""Qwen3.5 mixtures of experts with their vision tower, which is untouched, and the layer that predicts a
further token, which is untouched but where it drafts (`mtp.py`)."""

from compress.models.archs.qwen3_5_moe_text import QWEN3_5_MOE
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_NAMES = {**LANGUAGE_MODEL_NAMES, "untouched": (*LANGUAGE_MODEL_NAMES["untouched"], "mtp")}
FAMILIES.add(
    "qwen3_5_moe",
    wrapper("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, **_NAMES),
)
