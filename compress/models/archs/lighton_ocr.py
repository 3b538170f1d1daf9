"""LightOnOCR (LightOn, arXiv 2601.14251): the text model is `qwen3`."""

from compress.models.archs.qwen2 import DEFAULT_SIZES
from compress.models.archs.qwen3 import QWEN3
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, sized, wrapper

QWEN3_INSIDE = sized(QWEN3, **DEFAULT_SIZES, max_position_embeddings=32768)
"""The text model of families whose text configs leave sizes to the defaults of `qwen3`."""

FAMILIES.add(
    "lighton_ocr",
    wrapper(
        "lighton_ocr",
        "LightOnOcrForConditionalGeneration",
        QWEN3_INSIDE,
        ties_by_default=True,
        untouched_elsewhere=("vision_tower", "multi_modal_projector"),
        other_names=("LightOnOCRForConditionalGeneration",),
        **{**LANGUAGE_MODEL_NAMES, "untouched": ("model.vision_encoder", "model.vision_projection")},
    ),
)
