"""Qwen3.5 with its vision tower and the layers that predict further tokens, both of which are untouched."""

from compress.models.archs.qwen3_5_text import QWEN3_5
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_NAMES = {**LANGUAGE_MODEL_NAMES, "untouched": (*LANGUAGE_MODEL_NAMES["untouched"], "mtp")}
FAMILIES.add(
    "qwen3_5",
    wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5, **_NAMES),
)
