"""Reference of the end of a half-layer whose output is normed: the norm, the sum with the residual stream
and, where what follows reads the stream normed, those norms too.

    s = scale round(x + norm(y)),   rows = following(s),   y may be round(norm_a(a) + norm_b(b))

With LAuReL, x is round(x + h + norm_l(l)).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.operands.rows import (
    ActivationQuant,
    Branch,
    LaurelRows,
    QuantizedRows,
    RowNorm,
)
from compress.kernels.rms_norm.reference import rms_norm, rms_norm_rows
from compress.kernels.select import Kernel, anything, register


def post_norm(
    y: Tensor | tuple[Branch, Branch],
    x_TD: Tensor,
    norm: RowNorm,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
    *,
    also: Sequence[RowNorm] = (),
    scale: float = 1.0,
    laurel: LaurelRows | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows | None, tuple[Tensor, ...]]:
    """Return the sum [T, D] of x and the norm of y, multiplied by `scale`, its norm by `following`, quantized
    if the next linear needs it, and its norms by `also`. Of two branches, y is the sum of their norms. With
    `laurel`, x is the sum of x and of its terms."""
    if isinstance(y, tuple):
        first_TD, second_TD = (_normed(each.values_TD, each.norm) for each in y)
        y = first_TD + second_TD
    if laurel is not None:
        low_rank_TD = _normed(laurel.low_rank.values_TD, laurel.low_rank.norm)
        terms = (each.to(torch.float32) for each in (laurel.rows_TD, low_rank_TD))
        x_TD = sum(terms, x_TD.to(torch.float32)).to(x_TD.dtype)
    sum_TD = x_TD + _normed(y, norm)
    if scale != 1:
        sum_TD = sum_TD * scale
    others = tuple(_normed(sum_TD, each) for each in also)
    if following is None:
        return sum_TD, None, others
    rows = rms_norm_rows(sum_TD, following.weight, following.eps, quant, centered=following.centered)
    return sum_TD, rows, others


def _normed(x_TD: Tensor, norm: RowNorm) -> Tensor:
    return rms_norm(x_TD, norm.weight, norm.eps, centered=norm.centered)


register(Kernel("post_norm", "reference", min_sm=0, priority=0, supports=anything, fn=post_norm))
