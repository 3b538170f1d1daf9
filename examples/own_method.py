"""A rounding method of your own: one class with a name, which a recipe uses like the methods that ship.

Run it anywhere: `python examples/own_method.py`. In a package, an entry point of the group `compress.methods`
makes the class known without this file.
"""

from typing import Literal

import torch
from pydantic import Field

import compress
from compress.calibrate.stats import InputStats
from compress.methods.quantize import ROUNDERS, Rounded, Rounder
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import Scheme


@ROUNDERS.register("shrunk")
class Shrunk(Rounder):
    """Round to nearest in a shrunk range: the largest weights of a group saturate, all others err less."""

    kind: Literal["shrunk"] = "shrunk"
    range_frac: float = Field(0.98, gt=0, le=1, description="share of the range of a group that codes cover")

    def round(
        self, w_OI: torch.Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype
    ) -> Rounded:
        w_OGN = grouped(w_OI, scheme)
        scale_OG, zero_OG = min_max_scale(w_OGN, scheme, scale_dtype, range_frac=self.range_frac)
        return Rounded(round_to_nearest(w_OI, scheme, scale_OG, zero_OG))


for rounder in ({"kind": "rtn"}, {"kind": "shrunk"}):
    result = compress.quantize(
        "builtin://reference", "W4A16_G128", round=rounder, measure_error=True, num_samples=4, seq_len=64
    )
    errors = [layer["error_after"] for layer in result.facts["quantize"]["layers"]]
    print(f"{rounder['kind']}: mean relative error of the linears' outputs {sum(errors) / len(errors):.5f}")
