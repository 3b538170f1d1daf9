"""Round to nearest: every weight takes the nearest code of its group's scale. The baseline of every rounder.

    c = clamp(round(w / s) + z),   value (c - z) s

With `scale: min_max` it is the pinned baseline (s = absmax / 7.5 for four symmetric bits). `mse` and
`hessian` search the range of each scale group (`quant/numerics.py`), which costs one rounding of the weights
for each of 40 ranges and often gives a lower error than plain GPTQ. `matrix` gives all weights of a linear
group one scale, that of the largest, as some checkpoint formats store static FP8. No weight makes up for the
error of another.

Shapes: O out, I in, G scale groups.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.quantize import ROUNDERS, Rounded, Rounder
from compress.quant.numerics import choose_scale, grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import Scheme


@ROUNDERS.register("rtn")
class Rtn(Rounder):
    """Rounding to nearest."""

    kind: Literal["rtn"] = "rtn"
    scale: Literal["min_max", "mse", "hessian", "matrix"] = Field(
        "min_max",
        description="range of a group: all of it, least squared error, or least output error; `matrix`: one "
        "scale for all linears of one input, for schemes with static inputs",
    )

    @property
    def one_scale(self) -> bool:
        return self.scale == "matrix"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,) if self.scale == "hessian" else ()

    def round(self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        if self.scale == "matrix":
            return self._with_one_scale(w_OI, scheme, scale_dtype)
        h_II = stats[SecondMoment].mean() if self.scale == "hessian" else None
        scale_OG, zero_point_OG = choose_scale(w_OI, scheme, scale_dtype, choice=self.scale, h_II=h_II)
        return Rounded(round_to_nearest(w_OI, scheme, scale_OG, zero_point_OG))

    def _with_one_scale(self, w_OI: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        """Return the codes of weights that share one scale.

        Raises:
            UsageError: the scheme has no static inputs; its weights may arrive a few rows at a time.
        """
        if scheme.activation != "tensor":
            raise UsageError(
                f"round: `scale: matrix` is for schemes with static inputs, not for {scheme.name}."
            )
        scale_OG, _ = min_max_scale(grouped(w_OI, scheme), scheme, scale_dtype)
        shared_OG = scale_OG.amax().expand_as(scale_OG).contiguous()
        return Rounded(round_to_nearest(w_OI, scheme, shared_OG, None))
