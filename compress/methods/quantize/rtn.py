"""Round to nearest: every weight takes the nearest code of its group's scale. The baseline, and the rounding inside every other method.

With `scale: min_max` it is the pinned baseline (absmax / 7.5 for four symmetric bits); `mse` and `hessian` search the range of each group
(see `quant/numerics.py`), which costs no more than the grid and often beats plain GPTQ.
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
