"""SmolVLM 2 (Hugging Face, arXiv 2504.05299): Idefics 3 for images and videos."""

from dataclasses import replace

from compress.models.archs.idefics3 import IDEFICS3
from compress.models.family import FAMILIES

FAMILIES.add(
    "smolvlm", replace(IDEFICS3, model_type="smolvlm", architecture="SmolVLMForConditionalGeneration")
)
