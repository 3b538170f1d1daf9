"""Reference RMSNorm (arXiv 1910.07467): weight * (x / sqrt(mean(x^2) + eps)), mean and division in float32,
each row on its own; with `centered` the mean of x is subtracted before (LayerNorm, arXiv 1607.06450), and a
bias may be added last.

torch's general reduction on CUDA splits a row among threads by the number of rows, which changes bits;
its norm kernel gives every row a block of the same shape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.select import Kernel, anything, register


def rms_norm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    quant: ActivationQuant | None = None,
    *,
    centered: bool = False,
    bias: Tensor | None = None,
) -> Tensor | QuantizedRows:
    """Return the norm, quantized if the next linear needs it."""
    normed = rms_norm(x, weight, eps, centered=centered, bias=bias)
    return normed if quant is None else quantize(normed, quant)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, centered: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Over the last axis of `x`; `weight` broadcasts against `x`. A float32 weight is multiplied before
    rounding, another one after. A float32 bias, for a float32 weight, is added before rounding."""
    assert bias is None or bias.dtype == weight.dtype == torch.float32
    x_f32 = x.to(torch.float32)
    if x.is_cuda:
        normed = (F.layer_norm if centered else F.rms_norm)(x_f32, x.shape[-1:], eps=eps)
    else:
        if centered:
            x_f32 = x_f32 - x_f32.mean(-1, keepdim=True)
        normed = x_f32 * x_f32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        scaled = normed * weight
        return (scaled if bias is None else scaled + bias).to(x.dtype)
    return normed.to(x.dtype) * weight


register(Kernel("rms_norm", "reference", min_sm=0, priority=0, supports=anything, fn=rms_norm_rows))
