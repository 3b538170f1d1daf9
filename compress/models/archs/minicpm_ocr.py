"""MiniCPM-OCR 1.0 (OpenBMB, 2026): MiniCPM-V 4.6 under another name, with four times as many tokens of each
image, and with a tied head unless stated otherwise."""

from compress.models.archs.minicpmv4_6 import minicpmv
from compress.models.family import FAMILIES

FAMILIES.add(
    "minicpm_ocr", minicpmv("minicpm_ocr", "MiniCPMOcrForConditionalGeneration", ties_by_default=True)
)
