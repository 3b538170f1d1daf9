"""Qwen3.5 with its vision tower, which is untouched, and the layer that predicts a further token, which is
untouched but where it drafts (`mtp.py`)."""

from compress.models.archs.qwen3_5_text import QWEN3_5
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_NAMES = {**LANGUAGE_MODEL_NAMES, "untouched": (*LANGUAGE_MODEL_NAMES["untouched"], "mtp")}
FAMILIES.add(
    "qwen3_5",
    wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5, **_NAMES),
)
