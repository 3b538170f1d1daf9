"""ShieldGemma 2 (arXiv 2504.01081): Gemma 3 with its vision tower, of whose logits a classifier reads those
of two words. The logits of all are computed here, and the class is that of the source."""

from dataclasses import replace

from compress.models.archs.gemma3 import GEMMA3
from compress.models.family import FAMILIES

_PARTS = ("vision_tower", "multi_modal_projector")

FAMILIES.add(
    "shieldgemma2",
    replace(
        GEMMA3,
        model_type="shieldgemma2",
        architecture="ShieldGemma2ForImageClassification",
        layer_prefix="model.language_model.model.layers.",
        outer_modules={name: f"model.{module}" for name, module in GEMMA3.outer_modules.items()},
        in_memory={
            "model.language_model.model.": "model.model.language_model.",
            "model.language_model.lm_head": "model.lm_head",
            **{f"model.{part}.": f"model.model.{part}." for part in _PARTS},
        },
        other_prefixes={"model.model.language_model.model.": "model.language_model.model."},
        untouched=tuple(f"model.{part}" for part in _PARTS),
    ),
)
