"""Loading codes next to a vision tower whose tensors `transformers` splits (Qianfan-OCR).

For a checkpoint with codes `transformers` 5.23 adds the tensors of codes to each step that joins or splits
tensors while it loads. It then refuses to build a step from several tensors to several.
"""

from typing import Any

import pytest
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.base import HfQuantizer

SPLIT = ("qianfan_ocr",)
"""Families whose towers have such tensors."""


def split_plain_tensors(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `transformers` leave the steps that split a tensor of such a family as they are: towers have no
    codes. Do nothing for other families."""
    if family not in SPLIT:
        return
    with_codes = HfQuantizer.update_weight_conversions

    def update(quantizer: HfQuantizer, conversions: list[Any], model: Any) -> list[Any]:
        splits = [each for each in conversions if _splits(each)]
        others = [each for each in conversions if not _splits(each)]
        return [*splits, *with_codes(quantizer, others, model)]

    monkeypatch.setattr(HfQuantizer, "update_weight_conversions", update)


def _splits(conversion: Any) -> bool:
    return isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1
