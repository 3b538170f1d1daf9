"""Qwen2-VL (arXiv 2409.12191): the text model is Qwen2, with the rope of Qwen2.5-VL."""

from dataclasses import replace

from compress.models.archs.qwen2_5_vl import QWEN2_5_VL, TEXT
from compress.models.family import FAMILIES

FAMILIES.add(
    "qwen2_vl",
    replace(
        QWEN2_5_VL,
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        text_families={"qwen2_vl_text": replace(TEXT, model_type="qwen2_vl_text")},
    ),
)
