"""HunyuanOCR and Hunyuan-VL (Tencent, arXiv 2511.19575): the text model is the dense Hunyuan, whose rope has
sections for the axes of a page, which are equal for text: it is the plain rope there."""

from dataclasses import replace
from typing import Any

from compress.models.archs.hunyuan_v1_dense import HUNYUAN_DENSE, HUNYUAN_FIELDS, hunyuan_implied
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import sized, wrapper
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    return {**rope_of_text(config), **hunyuan_implied(config)}


_ALIASES = {"head_dim": "attention_head_dim", "vocab_size": "org_vocab_size"}
_TEXT = sized(
    replace(
        HUNYUAN_DENSE,
        model_type="hunyuan_vl_text",
        implied=_implied,
        aliases=_ALIASES,
        known_fields=(HUNYUAN_FIELDS - {*_ALIASES.values()}) | {"pad_id"},
    ),
    vocab_size=290943,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
)

FAMILIES.add(
    "hunyuan_vl",
    wrapper(
        "hunyuan_vl",
        "HunYuanVLForConditionalGeneration",
        _TEXT,
        ties_by_default=True,
        text_ties=True,
        in_memory={"vit.": "model.vision_tower.", "model.": "model.language_model."},
        untouched=("vit",),
        outside=frozenset(
            {
                "vision_config",
                "image_token_id",
                "image_start_token_id",
                "image_end_token_id",
                "image_newline_token_id",
                "im_start_id",
                "im_end_id",
                "im_newline_id",
            }
        ),
    ),
)
