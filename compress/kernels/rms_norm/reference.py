"""Reference RMSNorm (arXiv 1910.07467): weight * (x / sqrt(mean(x^2) + eps)), mean and division in float32, each row on its own."""

import torch
from torch import Tensor

from compress.kernels.select import Kernel, anything, register


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis of `x`; `weight` broadcasts against `x`."""
    x_f32 = x.to(torch.float32)
    scale = x_f32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x_f32 * scale).to(x.dtype) * weight


register(Kernel("rms_norm", "reference", min_sm=0, rank=0, supports=anything, fn=rms_norm))
