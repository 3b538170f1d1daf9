"""Kimi K2 (Moonshot AI, arXiv 2507.20534): DeepSeek-V3 by another name."""

from dataclasses import replace

from compress.models.archs.deepseek_v3 import DEEPSEEK_V3
from compress.models.family import FAMILIES

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

FAMILIES.add("kimi_k2", KIMI_K2)
