"""ViP-LLaVA (arXiv 2312.00784): LLaVA that reads what was drawn into an image; the text model is `llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, wrapper

FAMILIES.add("vipllava", wrapper("vipllava", "VipLlavaForConditionalGeneration", LLAMA_7B, **LLAVA_NAMES))
