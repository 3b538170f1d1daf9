"""PaddleOCR-VL (Baidu, arXiv 2510.14528): the text model is ERNIE 4.5, whose heads rotate by halves here. Its
rope has sections for the time, height and width of a token, which are equal for text: it is the plain rope
there."""

from dataclasses import replace

from compress.models.archs.ernie4_5 import ERNIE4_5
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import sized, wrapper

_TEXT = sized(
    replace(
        ERNIE4_5,
        model_type="paddleocr_vl_text",
        interleaved_rotary=False,
        implied=rope_of_text,
        fixed_fields={"rope_is_neox_style": True},
    ),
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
)

FAMILIES.add(
    "paddleocr_vl",
    wrapper(
        "paddleocr_vl",
        "PaddleOCRVLForConditionalGeneration",
        _TEXT,
        ties_by_default=True,
        text_ties=True,
        in_memory={
            "visual.": "model.visual.",
            "mlp_AR.": "model.projector.",
            "model.": "model.language_model.",
        },
        untouched=("visual", "mlp_AR"),
        outside=frozenset(
            {
                "auto_map",
                "vision_config",
                "image_token_id",
                "video_token_id",
                "vision_start_token_id",
                "vision_end_token_id",
            }
        ),
    ),
)
