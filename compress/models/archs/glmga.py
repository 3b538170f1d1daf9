"""GLM-GA (Z.ai, 2026): GLM-4.6V-Flash under another name."""

from dataclasses import replace

from compress.models.archs.glm4v import GLM4V
from compress.models.family import FAMILIES

FAMILIES.add(
    "glmga",
    replace(GLM4V, model_type="glmga", architecture="Glm46VForConditionalGeneration", text_ties=False),
)
