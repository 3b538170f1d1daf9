"""GLM-4.6V-Flash (Z.ai, 2025): GLM-4.1V under another name."""

from dataclasses import replace

from compress.models.archs.glm4v import GLM4V
from compress.models.family import FAMILIES

FAMILIES.add(
    "glm46v",
    replace(GLM4V, model_type="glm46v", architecture="Glm46VForConditionalGeneration", text_ties=False),
)
