"""MiniCPM-V 4.7 (OpenBMB, 2026): MiniCPM-V 4.6 whose images have positions of two axes; those of text are as
before."""

from compress.models.archs.minicpmv4_6 import minicpmv
from compress.models.family import FAMILIES

FAMILIES.add("minicpmv4_7", minicpmv("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration"))
