"""AWQ (arXiv 2306.00978): before rounding, scale up the input channels that matter and divide what produces
them by the same scale.

The scale s is searched over two families, s = m_x^r (by the magnitude of the inputs) and s = m_x^r /
m_w^(1-r) (and of the weights), with r on a grid, normalised to sqrt(max s * min s) = 1. The loss is the
output error of the rounded linears in Gram form,

    loss(s) = tr(dW H dW^T),   dW = Q(W s) / s - W,   H = E[x x^T]

which equals the squared error of the linears over all tokens without running them: its cost does not depend
on the number of tokens. Linears that share the input share s, and their losses add (stacked along O).

Not done: clipping, the other half of the paper, is the rounders' `scale: hessian`.

Shapes: O out, I in, G scale groups, N columns of a scale group, K kv heads, R query heads per kv head, C head
dimension.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import AbsMean, InputStats, SecondMoment, Stat
from compress.methods.quantize import SMOOTHERS, Smoother
from compress.models.surgery import tie_heads
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest, ungrouped
from compress.quant.products import product
from compress.quant.scheme import Scheme

SMALLEST = 1e-4
"""Lower bound of magnitudes and scales: a channel of zeros must not make a scale zero or infinite."""


@SMOOTHERS.register("awq")
class Awq(Smoother):
    """Activation-aware scales, searched on a grid."""

    kind: Literal["awq"] = "awq"
    num_ratios: int = Field(
        10,
        ge=2,
        le=1_000,
        description="grid points of the exponent r in [0, 1], for each of the two families",
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, AbsMean

    def no_effect_on(self, scheme: Scheme) -> str | None:
        """Return None for integer codes, and for floats of four bits, whose steps are as coarse.

        Float codes of eight bits gain nothing; mean KL of FP8_DYNAMIC on the bundled model: RTN 0.0091,
        AWQ + RTN 0.0091, GPTQ 0.0064, AWQ + GPTQ 0.0065.
        """
        if scheme.num_bits < 8 or scheme.type == "int":
            return None
        return (
            "it gives large channels finer integer steps, and the steps of a float are relative already. "
            "Leave out `smooth`."
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
        h_II = stats[SecondMoment].mean()
        best_I = torch.ones(w_OI.shape[1], device=w_OI.device)
        best_loss = rounding_loss(w_OI, best_I, h_II, scheme, scale_dtype)
        x_I = tie_heads(stats[AbsMean].mean(), head_repeat, "mean")
        w_I = tie_heads(_relative_magnitude(w_OI, scheme), head_repeat, "mean")
        for scale_I in _candidates(x_I, w_I, self.num_ratios):
            loss = rounding_loss(w_OI, scale_I, h_II, scheme, scale_dtype)
            if loss < best_loss:
                best_I = scale_I
                best_loss = loss
        return best_I


def rounding_loss(
    w_OI: Tensor, scale_I: Tensor, h_II: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> float:
    """Return tr(dW H dW^T) of rounding W * s to nearest."""
    scaled_OI = w_OI * scale_I
    scale_OG, zero_point_OG = min_max_scale(grouped(scaled_OI, scheme), scheme, scale_dtype)
    rounded = round_to_nearest(scaled_OI, scheme, scale_OG, zero_point_OG)
    delta_OI = rounded.dequantize(torch.float32) / scale_I - w_OI
    return float((product(delta_OI, h_II) * delta_OI).sum())


def _candidates(x_I: Tensor, w_I: Tensor, num_ratios: int) -> Iterator[Tensor]:
    """Yield the scales [I] of both families on the grid of exponents."""
    for step in range(num_ratios):
        ratio = step / (num_ratios - 1)
        yield _normalised(x_I**ratio)
        yield _normalised(x_I**ratio / w_I.clamp(min=SMALLEST) ** (1 - ratio))


def _normalised(scale_I: Tensor) -> Tensor:
    """Return the scale divided by sqrt(max * min)."""
    scale_I = scale_I.clamp(min=SMALLEST)
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def _relative_magnitude(w_OI: Tensor, scheme: Scheme) -> Tensor:
    """Return the mean over O of |w| relative to the largest of its scale group, [I]."""
    w_OGN = grouped(w_OI, scheme).abs()
    return ungrouped(w_OGN / w_OGN.amax(dim=-1, keepdim=True).clamp(min=SMALLEST), scheme, w_OI.shape).mean(
        dim=0
    )
