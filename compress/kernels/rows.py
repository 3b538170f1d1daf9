"""Rows of activations as an FP8 linear reads them: values on the e4m3 grid and one scale a row.

    scale = max(absmax(x) / 448, tiny)        dynamic, per token: a row's values depend on the row alone
    values = round_to_e4m3(x / scale)         saturating at +-448, the largest e4m3 number (arXiv 2209.05433)

A static scale is one number for the whole tensor, found by calibration. Dynamic per tensor is not offered: it would couple rows.
Shapes: T rows, K features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY_SCALE = 2.0**-40
"""Scale of a row of zeros; far above the least normal float32, so that x / scale cannot overflow."""


@dataclass(frozen=True)
class ActivationQuant:
    """How a linear wants its input. `static_scale` is a float32 scalar on the device, or None for one dynamic scale per token."""

    static_scale: Tensor | None = None


@dataclass(frozen=True)
class QuantizedRows:
    """x [T, K] ~ values * scale: e4m3 values [T, K], float32 scale [T]."""

    values_TK: Tensor
    scale_T: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_TK.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values_TK.to(torch.float32) * self.scale_T.unsqueeze(1)).to(dtype)


@dataclass(frozen=True)
class RawRows:
    """x [T, K] before what its linear wants of it: RMSNorm where `weight_K` is given, then rounding where `quant` is. A linear that takes
    them does both as it reads the rows."""

    x_TK: Tensor
    weight_K: Tensor | None = None
    eps: float = 0.0
    quant: ActivationQuant | None = None

    @property
    def shape(self) -> torch.Size:
        return self.x_TK.shape


def dynamic_scale(x_f32: Tensor) -> Tensor:
    """Over the last axis. The divisor is a tensor: by a number, torch multiplies with the reciprocal on CUDA, which rounds otherwise."""
    absmax = x_f32.abs().amax(dim=-1)
    return (absmax / absmax.new_full((), FP8_MAX)).clamp_min(TINY_SCALE)


def quantize(x_TK: Tensor, quant: ActivationQuant) -> QuantizedRows:
    """The definition that every kernel is held to."""
    x_f32 = x_TK.to(torch.float32)
    if quant.static_scale is None:
        scale_T = dynamic_scale(x_f32)
    else:
        scale_T = quant.static_scale.to(torch.float32).expand(x_TK.shape[0]).contiguous()
    values = (x_f32 / scale_T.unsqueeze(1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantizedRows(values, scale_T)
