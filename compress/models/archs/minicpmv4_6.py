"""MiniCPM-V 4.6 (OpenBMB, 2026): the text model is that of Qwen3.5."""

from typing import Any

from compress.models.archs.qwen3_5_text import QWEN3_5
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, Wrapper, wrapper

_NAMES = {
    **LANGUAGE_MODEL_NAMES,
    "untouched": ("model.vision_tower", "model.merger", "mtp"),
    "untouched_elsewhere": ("vpm", "vit_merger"),
}


def minicpmv(model_type: str, architecture: str, **facts: Any) -> Wrapper:
    """Return the table of one version."""
    return wrapper(model_type, architecture, QWEN3_5, **_NAMES, **facts)


FAMILIES.add("minicpmv4_6", minicpmv("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration"))
