"""HyperCLOVA X SEED Think 32B (NAVER, 2025) by the name under which it was published."""

from dataclasses import replace

from compress.models.archs.hyperclovax_vision_v2 import HYPERCLOVAX_VISION_V2
from compress.models.family import FAMILIES

FAMILIES.add("vlm", replace(HYPERCLOVAX_VISION_V2, model_type="vlm"))
