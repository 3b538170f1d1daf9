"""Reference of the end of a half-layer whose output is normed: the norm, the sum with the residual stream
and, where the next linear reads the stream normed, that norm too.

    s = scale round(x + norm(y)),   rows = following(s)
"""

from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.rms_norm.reference import rms_norm, rms_norm_rows
from compress.kernels.select import Kernel, anything, register


def post_norm(
    y_TD: Tensor,
    x_TD: Tensor,
    norm: RowNorm,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | QuantizedRows | None]:
    """Return the sum [T, D], multiplied by `scale`, and its norm by `following`, quantized if the next linear
    needs it."""
    sum_TD = x_TD + rms_norm(y_TD, norm.weight, norm.eps, centered=norm.centered)
    if scale != 1:
        sum_TD = sum_TD * scale
    if following is None:
        return sum_TD, None
    rows = rms_norm_rows(sum_TD, following.weight, following.eps, quant, centered=following.centered)
    return sum_TD, rows


register(Kernel("post_norm", "reference", min_sm=0, priority=0, supports=anything, fn=post_norm))
