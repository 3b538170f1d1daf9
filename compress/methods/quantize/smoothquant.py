"""SmoothQuant (arXiv 2211.10438): activations have outlier channels and weights have none, so move a part of
the range over.

    s_j = max|x_j|^a / max|w_j|^(1 - a),   x' = x / s,   W' = W s

At a = 1/2 input j and column j of the weight get the same range, up to one factor for all j; at a = 1 all
inputs get one range and the weights take all of it. A factor that is the same for all j changes neither the
relative steps of a token nor those of an output channel, so s is normalised to a geometric mean of 1, which
keeps weights at their size. A channel that is zero on all calibration tokens, or that no weight reads, gives
no information about its range and keeps s = 1.

This pays where inputs are rounded to integers too (INT8_DYNAMIC).

Not done: the paper also smooths the operands of attention's products.

Shapes: O out, I in, K kv heads, R query heads per kv head, C head dimension.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats, Stat
from compress.methods.quantize import SMOOTHERS, Smoother
from compress.models.surgery import tie_heads
from compress.quant.scheme import Scheme


@SMOOTHERS.register("smoothquant")
class SmoothQuant(Smoother):
    """Scales that balance the ranges of inputs and weights."""

    kind: Literal["smoothquant"] = "smoothquant"
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how much of the inputs' range moves into the weights: 0 none of it, 1 all",
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (AbsMax,)

    def no_effect_on(self, scheme: Scheme) -> str | None:
        if scheme.activation is not None:
            return None
        return (
            "it moves outliers out of the inputs, which this scheme leaves in 16 bits. "
            "Use `awq`, or leave out `smooth`."
        )

    def scale(
        self,
        w_OI: Tensor,
        stats: InputStats,
        scheme: Scheme,
        *,
        scale_dtype: torch.dtype,
        head_repeat: tuple[int, int],
    ) -> Tensor:
        return balanced(
            tie_heads(stats[AbsMax].per_feature(), head_repeat, "max"),
            tie_heads(w_OI.abs().amax(dim=0), head_repeat, "max"),
            alpha=self.alpha,
        )


def balanced(x_I: Tensor, w_I: Tensor, *, alpha: float) -> Tensor:
    """Return the scale s [I] from the largest |input| and the largest |weight| of each channel."""
    is_alive_I = (x_I > 0) & (w_I > 0)
    one = torch.ones_like(x_I)
    log_I = (
        alpha * torch.where(is_alive_I, x_I, one).log()
        - (1 - alpha) * torch.where(is_alive_I, w_I, one).log()
    )
    mean = log_I.sum() / is_alive_I.sum().clamp(min=1)
    return torch.where(is_alive_I, torch.exp(log_I - mean), one)
