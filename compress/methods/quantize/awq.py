"""AWQ (arXiv 2306.00978): scale up the input channels that matter before rounding, and divide whatever produces them by the same scale.

The scale is searched over s = m_x^r (how large the inputs are) and s = m_x^r / m_w^(1-r) (and how small the weights), r on a grid,
normalised to sqrt(max s * min s) = 1. The loss is the output error of the rounded linears in Gram form,

    loss(s) = tr(dW H dW^T),   dW = Q(W s) / s - W,   H = E[x x^T]

which is the squared error of the replayed linears without replaying them: its cost does not depend on the number of tokens. Linears that
share the input share s, and their losses add (stacked along O). Clipping, the other half of the paper, is the rounders' `scale: hessian`.

Shapes: O out, I in, G groups, N members of a group, K kv heads, R repeats, C head dimension.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import AbsMean, InputStats, SecondMoment, Stat
from compress.methods.quantize import SMOOTHERS, Smoother
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest, ungrouped
from compress.quant.products import product
from compress.quant.scheme import Scheme

SMALLEST = 1e-4


@SMOOTHERS.register("awq")
class Awq(Smoother):
    kind: Literal["awq"] = "awq"
    num_ratios: int = Field(
        10, ge=2, description="grid points of the exponent r in [0, 1], for each of the two families"
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, AbsMean

    def idle(self, scheme: Scheme) -> str | None:
        """Measured on the bundled model, mean KL of FP8_DYNAMIC: RTN 0.0091, AWQ + RTN 0.0091, GPTQ 0.0064, AWQ + GPTQ 0.0065."""
        if scheme.type == "int":
            return None
        return "it gives large channels finer integer steps, and the steps of a float are relative already. Leave out `smooth`."

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
        x_I = _tied(stats[AbsMean].mean(), head_repeat)
        w_I = _tied(_relative_magnitude(w_OI, scheme), head_repeat)
        for scale_I in _candidates(x_I, w_I, self.num_ratios):
            loss = rounding_loss(w_OI, scale_I, h_II, scheme, scale_dtype)
            if loss < best_loss:
                best_I = scale_I
                best_loss = loss
        return best_I


def rounding_loss(
    w_OI: Tensor, scale_I: Tensor, h_II: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> float:
    """tr(dW H dW^T) of rounding W * s to nearest."""
    scaled_OI = w_OI * scale_I
    scale_OG, zero_point_OG = min_max_scale(grouped(scaled_OI, scheme), scheme, scale_dtype)
    rounded = round_to_nearest(scaled_OI, scheme, scale_OG, zero_point_OG)
    delta_OI = rounded.dequantize(torch.float32) / scale_I - w_OI
    return float((product(delta_OI, h_II) * delta_OI).sum())


def _candidates(x_I: Tensor, w_I: Tensor, num_ratios: int) -> Iterator[Tensor]:
    for step in range(num_ratios):
        ratio = step / (num_ratios - 1)
        yield _normalised(x_I**ratio)
        yield _normalised(x_I**ratio / w_I.clamp(min=SMALLEST) ** (1 - ratio))


def _normalised(scale_I: Tensor) -> Tensor:
    scale_I = scale_I.clamp(min=SMALLEST)
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def _relative_magnitude(w_OI: Tensor, scheme: Scheme) -> Tensor:
    """Mean over O of |w| relative to the largest of its group, [I]."""
    w_OGN = grouped(w_OI, scheme).abs()
    return ungrouped(w_OGN / w_OGN.amax(dim=-1, keepdim=True).clamp(min=SMALLEST), scheme, w_OI.shape).mean(
        dim=0
    )


def _tied(value_I: Tensor, head_repeat: tuple[int, int]) -> Tensor:
    """Mean over the columns that must share a scale, laid out over I again."""
    repeat, head_dim = head_repeat
    if repeat == 1:
        return value_I
    grouped_KRC = value_I.view(-1, repeat, head_dim)
    return grouped_KRC.mean(dim=1, keepdim=True).expand_as(grouped_KRC).reshape(-1)
