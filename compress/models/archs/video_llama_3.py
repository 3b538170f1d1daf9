"""VideoLLaMA 3 (Alibaba DAMO Academy, arXiv 2501.13106): the text model is `qwen2`."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, sized, wrapper

FAMILIES.add(
    "video_llama_3",
    wrapper(
        "video_llama_3",
        "VideoLlama3ForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        text_ties=True,
        **{**LANGUAGE_MODEL_NAMES, "untouched": ("model.vision_model", "model.projector")},
    ),
)
