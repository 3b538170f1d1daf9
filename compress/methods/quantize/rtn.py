"""Round to nearest: every weight takes the nearest code of its group's scale. The baseline of every rounder.

    c = clamp(round(w / s) + z),   value (c - z) s

With `scale: min_max` it is the pinned baseline (s = absmax / 7.5 for four symmetric bits). `mse` and
`hessian` search the range of each scale group (`quant/numerics.py`), which costs one rounding of the weights
for each of 40 ranges and often gives a lower error than plain GPTQ. No weight makes up for the error of
another.

Shapes: O out, I in, G scale groups.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.methods.quantize import ROUNDERS, Rounded, Rounder
from compress.quant.numerics import ScaleChoice, choose_scale, round_to_nearest
from compress.quant.scheme import Scheme


@ROUNDERS.register("rtn")
class Rtn(Rounder):
    """Rounding to nearest."""

    kind: Literal["rtn"] = "rtn"
    scale: ScaleChoice = Field(
        "min_max", description="range of a group: all of it, least squared error, or least output error"
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,) if self.scale == "hessian" else ()

    def round(self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        h_II = stats[SecondMoment].mean() if self.scale == "hessian" else None
        scale_OG, zero_point_OG = choose_scale(w_OI, scheme, scale_dtype, choice=self.scale, h_II=h_II)
        return Rounded(round_to_nearest(w_OI, scheme, scale_OG, zero_point_OG))
