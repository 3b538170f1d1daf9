"""Rows of activations as an 8-bit linear reads them: values on the grid of e4m3 or int8, and one scale a
row.

    scale = max(absmax(x) / largest, tiny)    dynamic: per token, or per token and group of columns
    values = round(x / scale)                 to the nearest, ties to even; saturating at +-largest

Dynamic values depend on their own row alone. The largest e4m3 number is 448 (arXiv 2209.05433). For int8
it is 127, so that no row saturates, as in SmoothQuant (arXiv 2211.10438) and vLLM; compressed-tensors
divides by 127.5 and clips the largest number of a row by half a step.

A static scale is one number for the whole tensor, found by calibration. Dynamic scales per tensor are not
offered: they would couple rows.

Shapes: T rows, K features, G groups of features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.quant.scheme import QuantizedWeight, Scheme

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
FP8_MAX = 448.0
INT8_MAX = 127.0
LARGEST = {FP8: FP8_MAX, INT8: INT8_MAX}
TINY_SCALE = 2.0**-40
"""Scale of a row of zeros; far above the least normal float32, so that x / scale cannot overflow."""


@dataclass(frozen=True)
class ActivationQuant:
    """The quantization of a linear's input. `static_scale` is a float32 scalar on the device, or None for
    one dynamic scale per token; with a `group_size`, one for each group of that many columns of a token.

    Rows of int8 have dynamic scales: an integer cannot be NaN, so only the scale shows that a row is
    broken.
    """

    static_scale: Tensor | None = None
    dtype: torch.dtype = FP8
    group_size: int | None = None

    def __post_init__(self) -> None:
        assert self.dtype == FP8 or self.static_scale is None, "int8 rows take their own scales"
        assert self.group_size is None or self.static_scale is None, "groups take their own scales"


def input_quant(weights: Sequence[Tensor | QuantizedWeight], device: torch.device) -> ActivationQuant | None:
    """Return how linears of one scheme that share their input round it, or None. Of several static scales
    the largest serves, which saturates none of them."""
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    if not quantized or quantized[0].scheme.activation is None:
        return None
    scales = [each.input_scale.to(torch.float32) for each in quantized if each.input_scale is not None]
    return activation_quant(quantized[0].scheme, torch.stack(scales).amax().to(device) if scales else None)


def activation_quant(scheme: Scheme, static_scale: Tensor | None = None) -> ActivationQuant:
    """Return how linears of a scheme that rounds inputs do so."""
    assert scheme.input_dtype is not None, "its inputs stay in 16 bits"
    return ActivationQuant(
        static_scale, scheme.input_dtype, scheme.group_size if scheme.activation == "group" else None
    )


@dataclass(frozen=True)
class QuantizedRows:
    """Rows x [T, K] ~ values * scale: e4m3 or int8 values [T, K], and a float32 scale [T], or [T, G] for
    groups of columns."""

    values_TK: Tensor
    scale_T: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_TK.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scale_TG = self.scale_T if self.scale_T.dim() == 2 else self.scale_T.unsqueeze(1)
        values_TGN = self.values_TK.to(torch.float32).unflatten(1, (scale_TG.shape[1], -1))
        return (values_TGN * scale_TG.unsqueeze(-1)).flatten(1).to(dtype)


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm over the last axis, with the mean subtracted before if `centered`.

    A weight in the rows' dtype multiplies rounded quotients; a float32 weight multiplies them before they are
    rounded, once: norms that add to their weights or scale their output are folded into one.
    """

    weight: Tensor
    eps: float
    centered: bool = False


@dataclass(frozen=True)
class RawRows:
    """Rows x [T, K] before the steps that their linear needs: RMSNorm where `weight_K` is given, then
    rounding where `quant` is. A linear that takes raw rows does both as it reads them."""

    x_TK: Tensor
    weight_K: Tensor | None = None
    eps: float = 0.0
    quant: ActivationQuant | None = None

    @property
    def shape(self) -> torch.Size:
        return self.x_TK.shape


def dynamic_scale(x_f32: Tensor, largest: float = FP8_MAX) -> Tensor:
    """Return the scales of rows, taken over the last axis.

    The divisor is a tensor: for a Python number, torch multiplies by its reciprocal on CUDA, which rounds
    differently.
    """
    absmax = x_f32.abs().amax(dim=-1)
    return (absmax / absmax.new_full((), largest)).clamp_min(TINY_SCALE)


def quantize(x_TK: Tensor, quant: ActivationQuant) -> QuantizedRows:
    """Quantize rows. This is the definition that every kernel is tested against."""
    x_f32 = x_TK.to(torch.float32)
    largest = LARGEST[quant.dtype]
    if quant.group_size is not None:
        assert x_TK.shape[1] % quant.group_size == 0, (
            f"{x_TK.shape[1]} features are no whole groups of {quant.group_size}"
        )
        parts = quantize(x_f32.reshape(-1, quant.group_size), replace(quant, group_size=None))
        return QuantizedRows(parts.values_TK.view(x_TK.shape), parts.scale_T.view(x_TK.shape[0], -1))
    if quant.static_scale is None:
        scale_T = dynamic_scale(x_f32, largest)
    else:
        scale_T = quant.static_scale.to(torch.float32).expand(x_TK.shape[0]).contiguous()
    scaled = (x_f32 / scale_T.unsqueeze(1)).clamp(-largest, largest)
    return QuantizedRows((scaled.round() if quant.dtype == INT8 else scaled).to(quant.dtype), scale_T)
