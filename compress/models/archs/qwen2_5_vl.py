"""Qwen2.5-VL (arXiv 2502.13923): the text model is Qwen2. Its rope has sections for the time, height and
width of a token (mrope); the three are equal for text, so that the sections do not matter there: it is the
plain rope."""

from dataclasses import replace

from compress.models.archs.qwen2 import QWEN2
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import wrapper

TEXT = replace(
    QWEN2,
    model_type="qwen2_5_vl_text",
    implied=rope_of_text,
    defaults={
        **QWEN2.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
    },
)
QWEN2_5_VL = wrapper(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    TEXT,
    in_memory={"visual.": "model.visual.", "model.": "model.language_model."},
    untouched=("visual",),
    outside=frozenset(
        {
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "vision_token_id",
        }
    ),
)

FAMILIES.add("qwen2_5_vl", QWEN2_5_VL)
