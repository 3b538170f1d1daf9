"""Qwen2.5-VL (arXiv 2502.13923): the text model is Qwen2. Its rope has sections for the time, height and
width of a token (mrope); the three are equal for text, so that the sections do not matter there: it is the
plain rope."""

from dataclasses import replace
from typing import Any

from compress.models.archs.qwen2 import QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

_SECTIONS = ("mrope_section", "mrope_interleaved")


def _implied(config: Fields) -> dict[str, Any]:
    rope = config.mapping("rope_parameters", default=config.mapping("rope_scaling", default={}))
    plain = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("rope_type", "type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return {"rope_parameters": plain or {"rope_type": "default"}}


_TEXT = replace(
    QWEN2,
    model_type="qwen2_5_vl_text",
    implied=_implied,
    defaults={
        **QWEN2.defaults,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
    },
)
FAMILIES.add(
    "qwen2_5_vl",
    wrapper(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        _TEXT,
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
    ),
)
