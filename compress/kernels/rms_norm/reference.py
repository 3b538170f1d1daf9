"""Reference RMSNorm (arXiv 1910.07467): weight * (x / sqrt(mean(x^2) + eps)), mean and division in float32,
each row on its own.

torch's general reduction on CUDA splits a row among threads by the number of rows, which changes bits;
its norm kernel gives every row a block of the same shape.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.select import Kernel, anything, register


def rms_norm_rows(
    x: Tensor, weight: Tensor, eps: float, quant: ActivationQuant | None = None
) -> Tensor | QuantizedRows:
    """Return the norm, quantized if the next linear needs it."""
    normed = rms_norm(x, weight, eps)
    return normed if quant is None else quantize(normed, quant)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis of `x`; `weight` broadcasts against `x`."""
    x_f32 = x.to(torch.float32)
    if x.is_cuda:
        normed = F.rms_norm(x_f32, x.shape[-1:], eps=eps)
    else:
        normed = x_f32 * x_f32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return normed.to(x.dtype) * weight


register(Kernel("rms_norm", "reference", min_sm=0, priority=0, supports=anything, fn=rms_norm_rows))
