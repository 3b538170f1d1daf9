"""Rows of activations as an 8-bit linear reads them: values on the grid of e4m3 or int8, and one scale a
row.

    scale = max(absmax(x) / largest, tiny)    dynamic: per token, or per token and group of columns
    values = round(x / scale)                 to the nearest, ties to even; saturating at +-largest

Dynamic values depend on their own row alone. The largest e4m3 number is 448 (arXiv 2209.05433). For int8
it is 127, so that no row saturates, as in SmoothQuant (arXiv 2211.10438) and vLLM; compressed-tensors
divides by 127.5 and clips the largest number of a row by half a step.

    scale = max((most - least) / 255, tiny)               asymmetric int8: least <= 0 <= most of the row
    zero = round(-128 - least / scale)                    within -128 .. 127
    values = clamp(round(x / scale) + zero, -128, 127)    x ~ (value - zero) * scale

A static scale is one number for the whole tensor, found by calibration, and so is a static zero point.
Static codes of int8 saturate at -128 and 127 as in compressed-tensors and vLLM, and the scale of a row with
a number that is not finite is NaN. Dynamic scales per tensor are not offered: they would couple rows.

Blocks of columns whose scales are one byte (`scale_type`) are rounded by `quant/block_inputs.py`. Their
scales, a global scale included, are float32 numbers here; numbers of e2m1 are held as e4m3.

Shapes: T rows, K features, G groups of features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.quant.block_inputs import quantize_blocks
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
    Rows of int8 that are not `symmetric` have zero points, too; `static_zero` is an int32 scalar on the
    device where the scale is static.

    With a `scale_type`, `num_bits` are those of values in groups whose scales are one byte; `global_scale`, a
    float32 scalar on the device, goes with scales of e4m3.
    """

    static_scale: Tensor | None = None
    dtype: torch.dtype = FP8
    group_size: int | None = None
    symmetric: bool = True
    static_zero: Tensor | None = None
    num_bits: int = 8
    scale_type: Literal["e4m3", "e8m0"] | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.group_size is None or self.static_scale is None, "groups take their own scales"
        assert self.symmetric or self.dtype == INT8, "zero points are those of int8"
        has_zero = not self.symmetric and self.static_scale is not None
        assert has_zero == (self.static_zero is not None), "a zero point goes with an asymmetric static scale"
        assert self.scale_type is None or self.group_size is not None, "scales of one byte are of groups"
        has_global = self.scale_type == "e4m3"
        assert has_global == (self.global_scale is not None), "a global scale goes with scales of e4m3"


def input_quant(weights: Sequence[Tensor | QuantizedWeight], device: torch.device) -> ActivationQuant | None:
    """Return how linears of one scheme that share their input round it, or None. Of several static scales
    the largest serves, which saturates none of them; so does the smallest global scale; of several with zero
    points, the range of all."""
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    if not quantized or quantized[0].scheme.activation is None:
        return None
    scheme = quantized[0].scheme
    global_scales = [each.input_global_scale for each in quantized if each.input_global_scale is not None]
    if global_scales:
        smallest = torch.stack([each.to(torch.float32).cpu() for each in global_scales]).amin()
        return activation_quant(scheme, global_scale=smallest.to(device))
    found = [each.input_scale.to(torch.float32).cpu() for each in quantized if each.input_scale is not None]
    if not found:
        return activation_quant(scheme)
    scales = torch.stack(found)
    zeros = [each.input_zero_point.cpu() for each in quantized if each.input_zero_point is not None]
    if scheme.input_symmetric:
        return activation_quant(scheme, scales.amax().to(device))
    scale, zero = _common_range(scales, torch.stack(zeros).to(torch.int32))
    return activation_quant(scheme, scale.to(device), zero.to(device))


def _common_range(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of the range that all of these cover; equal ones stay as they
    are."""
    if bool((scales == scales[0]).all()) and bool((zeros == zeros[0]).all()):
        return scales[0], zeros[0]
    least = ((-128 - zeros) * scales).amin()
    scale = (((127 - zeros) * scales).amax() - least) / 255
    return scale, (-128 - least / scale).round().clamp(-128, 127).to(torch.int32)


def activation_quant(
    scheme: Scheme,
    static_scale: Tensor | None = None,
    static_zero: Tensor | None = None,
    *,
    global_scale: Tensor | None = None,
) -> ActivationQuant:
    """Return how linears of a scheme that rounds inputs do so."""
    assert scheme.input_dtype is not None, "its inputs stay in 16 bits"
    return ActivationQuant(
        static_scale,
        scheme.input_dtype,
        scheme.group_size if scheme.activation == "group" else None,
        scheme.input_symmetric,
        None if static_zero is None else static_zero.to(torch.int32),
        scheme.num_bits if scheme.scale_type is not None else 8,
        scheme.scale_type,
        global_scale,
    )


@dataclass(frozen=True)
class QuantizedRows:
    """Rows x [T, K] ~ values * scale: e4m3 or int8 values [T, K], and a float32 scale [T], or [T, G] for
    groups of columns. Asymmetric int8 rows are (values - zero) * scale, with an int32 zero point [T]."""

    values_TK: Tensor
    scale_T: Tensor
    zero_T: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.values_TK.shape

    def __getitem__(self, rows: slice) -> "QuantizedRows":
        """Return some of the rows."""
        zero_T = None if self.zero_T is None else self.zero_T[rows]
        return QuantizedRows(self.values_TK[rows], self.scale_T[rows], zero_T)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scale_TG = self.scale_T if self.scale_T.dim() == 2 else self.scale_T.unsqueeze(1)
        values_TK = self.values_TK.to(torch.float32)
        if self.zero_T is not None:
            values_TK = values_TK - self.zero_T.unsqueeze(1)
        values_TGN = values_TK.unflatten(1, (scale_TG.shape[1], -1))
        return (values_TGN * scale_TG.unsqueeze(-1)).flatten(1).to(dtype)


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm over the last axis, with the mean subtracted before if `centered`.

    A weight in the rows' dtype multiplies rounded quotients; a float32 weight multiplies them before they are
    rounded, once: norms that add to their weights or scale their output are folded into one. A bias goes with
    a float32 weight, is float32 and is added before rounding.
    """

    weight: Tensor
    eps: float
    centered: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class Branch:
    """An output [T, D] of a half-layer that is normed before it is added to another one."""

    values_TD: Tensor
    norm: RowNorm


@dataclass(frozen=True)
class LaurelRows:
    """The terms that LAuReL (arXiv 2411.07501) adds to the stream next to the output of a half-layer: the
    rows [T, D] that the half-layer reads, and a low-rank product of them, which is normed."""

    rows_TD: Tensor
    low_rank: Branch


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
    if quant.group_size is not None and quant.scale_type is not None:
        return QuantizedRows(
            *quantize_blocks(
                x_f32,
                block_size=quant.group_size,
                num_bits=quant.num_bits,
                global_scale=quant.global_scale,
            )
        )
    if quant.group_size is not None:
        assert x_TK.shape[1] % quant.group_size == 0, (
            f"{x_TK.shape[1]} features are no whole groups of {quant.group_size}"
        )
        parts = quantize(x_f32.reshape(-1, quant.group_size), replace(quant, group_size=None))
        num_groups = x_TK.shape[1] // quant.group_size
        return QuantizedRows(parts.values_TK.view(x_TK.shape), parts.scale_T.view(-1, num_groups))
    if quant.dtype == INT8 and (quant.static_scale is not None or not quant.symmetric):
        return _whole_range(x_f32, quant)
    if quant.static_scale is None:
        scale_T = dynamic_scale(x_f32, largest)
    else:
        scale_T = quant.static_scale.to(torch.float32).expand(x_TK.shape[0]).contiguous()
    scaled = (x_f32 / scale_T.unsqueeze(1)).clamp(-largest, largest)
    return QuantizedRows((scaled.round() if quant.dtype == INT8 else scaled).to(quant.dtype), scale_T)


def _whole_range(x_f32: Tensor, quant: ActivationQuant) -> QuantizedRows:
    """Quantize rows to int8 by a static scale, or by a scale and a zero point each."""
    zero_T = None
    if quant.static_scale is not None:
        sound_T = x_f32.abs().amax(dim=1) < torch.inf
        scale = quant.static_scale.to(torch.float32)
        scale_T = torch.where(sound_T, scale, torch.full_like(scale, torch.nan))
        steps_TK = x_f32 / scale
        if quant.static_zero is not None:
            zero_T = quant.static_zero.expand(len(x_f32)).contiguous()
    else:
        least_T = x_f32.amin(dim=1).clamp_max(0)
        size_T = x_f32.amax(dim=1).clamp_min(0) - least_T
        scale_T = (size_T / size_T.new_full((), 255.0)).clamp_min(TINY_SCALE)
        steps_TK = x_f32 / scale_T.unsqueeze(1)
        zero_T = (-128 - least_T / scale_T).nan_to_num().clamp(-128, 127).round().to(torch.int32)
    codes_TK = steps_TK.nan_to_num().round()
    codes_TK = codes_TK if zero_T is None else codes_TK + zero_T.unsqueeze(1)
    return QuantizedRows(codes_TK.clamp(-128, 127).to(INT8), scale_T, zero_T)
