"""DeepSeek-VL (arXiv 2403.05525), the models with one tower: the text model is `llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

DEEPSEEK_VL = wrapper(
    "deepseek_vl",
    "DeepseekVLForConditionalGeneration",
    LLAMA_7B,
    ties_by_default=True,
    **{**LANGUAGE_MODEL_NAMES, "untouched": ("model.vision_model", "model.aligner")},
)

FAMILIES.add("deepseek_vl", DEEPSEEK_VL)
