"""The float32 scale that all scales of an NVFP4 matrix share, and its sharing by linears that are multiplied
as one."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.quant.scale_grid import from_e4m3, global_scale_of, to_e4m3
from compress.quant.scheme import QuantizedWeight


def with_one_global_scale(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return weights that are multiplied as one with the smallest of their global scales, as consumers that
    stack them need; a scale that e4m3 has less precision for then is rounded. Other schemes stay.

    Raises:
        UnsupportedFormat: weights that came with global scales of their own would be rounded.
    """
    if any(each.scheme.scale_type != "e4m3" for each in weights):
        return list(weights)
    global_scale = torch.stack([_own_global_scale(each) for each in weights]).amin()
    shared = [
        replace(
            each,
            scale_OG=from_e4m3(to_e4m3(each.scale_OG, global_scale), global_scale).to(each.scale_OG.dtype),
            global_scale=global_scale,
        )
        for each in weights
    ]
    given = [(a, b) for a, b in zip(weights, shared, strict=True) if a.global_scale is not None]
    if any(not torch.equal(a.scale_OG, b.scale_OG) for a, b in given):
        raise UnsupportedFormat(
            "linears that are one matrix in the other checkpoint came with several global scales, and one "
            "for all of them would round them."
            if len(weights) > 1
            else "the scales of a linear are products with a second scale, as modelopt stores them, and "
            "dividing by its reciprocal would round them."
        )
    return shared


def _own_global_scale(weight: QuantizedWeight) -> Tensor:
    return global_scale_of(weight.scale_OG) if weight.global_scale is None else weight.global_scale
