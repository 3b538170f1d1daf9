"""Qianfan-OCR (Baidu, arXiv 2603.13398): InternVL around `qwen3`, whose checkpoints keep the names of the
vendor's InternVL."""

from compress.models.archs.qwen2 import DEFAULT_SIZES
from compress.models.archs.qwen3 import QWEN3
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

FAMILIES.add(
    "qianfan_ocr",
    wrapper(
        "qianfan_ocr",
        "QianfanOCRForConditionalGeneration",
        sized(QWEN3, **DEFAULT_SIZES, max_position_embeddings=32768),
        **{
            **LLAVA_NAMES,
            "in_memory": {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head": "lm_head",
            },
            # `transformers` renames and splits tensors of the tower; those that it saved so stay as they are.
            "untouched": ("vision_model", "mlp1", "model.vision_tower", "model.multi_modal_projector"),
        },
    ),
)
