"""RMSNorm (arXiv 1910.07467), one row a program, quantized on the way out if the next linear needs it.

    y = round(round(x / sqrt(mean(x^2) + eps)) * weight)    mean and quotient in float32; round: to x's dtype
    y = round(x / sqrt(mean(x^2) + eps) * weight)           where the weight is float32 and x is not

With `centered` the mean of x is subtracted before (LayerNorm, arXiv 1607.06450). A float32 bias, for a
float32 weight, is added before rounding.

Rounding follows the reference. The weight is constant, so it is read before the program waits for the
kernel ahead.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows
from compress.kernels.quantize_rows.fused import row_options, row_output, row_refusal, store_row
from compress.kernels.select import Kernel, register

ALIGNMENT = 16
"""Bytes. Triton gives rows off them another layout, and with it another order of summation."""


@jit()
def normed_row(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, CENTERED: tl.constexpr
) -> tl.tensor:
    """Return the norm of a row x [BLOCK], zero beyond SIZE, rounded to its dtype."""
    quotient = _quotient(x, eps, SIZE, CENTERED)
    if weight.dtype == tl.float32:
        return (quotient * weight).to(x.dtype)
    return (quotient.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@jit()
def _quotient(x: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, CENTERED: tl.constexpr) -> tl.tensor:
    """Return a row x [BLOCK], less its mean if CENTERED, over the root of its mean square, float32."""
    x_f32 = x.to(tl.float32)
    if CENTERED:
        real = tl.arange(0, x.shape[0]) < SIZE
        x_f32 = tl.where(real, x_f32 - tl.sum(x_f32, axis=0) / SIZE, 0.0)
    return x_f32 * tl.rsqrt(tl.sum(x_f32 * x_f32, axis=0) / SIZE + eps)


@jit()
def _rms_norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    eps: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    WEIGHT_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    CENTERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + row % WEIGHT_ROWS * SIZE + columns, mask=columns < SIZE, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < SIZE, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * STRIDE + columns, mask=columns < SIZE, other=0.0)
    if bias_ptr is None:
        y = normed_row(x, weight, eps, SIZE, CENTERED)
    else:
        y = (_quotient(x, eps, SIZE, CENTERED) * weight + bias).to(x.dtype)
    store_row(
        y, row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
        SIZE, BLOCK, QUANT, GROUP, CONVERTS,
    )  # fmt: skip


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    quant: ActivationQuant | None = None,
    *,
    centered: bool = False,
    bias: Tensor | None = None,
) -> Tensor | QuantizedRows:
    """Over the last axis; `weight` has the last axes of `x`, which may be columns of wider rows, and a bias
    the last one. Quantized rows are [other axes, last axis]."""
    size = x.shape[-1]
    assert weight.shape == x.shape[x.dim() - weight.dim() :], (
        f"weight {tuple(weight.shape)} for rows of {tuple(x.shape)}"
    )
    assert weight.dtype in (x.dtype, torch.float32), f"weight is {weight.dtype}, rows are {x.dtype}"
    assert bias is None or (
        bias.shape == weight.shape == (size,) and bias.dtype == weight.dtype == torch.float32
    )
    num_rows = x.numel() // size
    out, output = row_output(num_rows, size, x.dtype, x.device, quant)
    weight_rows = weight.numel() // size
    x = x if are_columns(x) else aligned(x)
    _rms_norm[(num_rows,)](
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        eps,
        WEIGHT_ROWS=weight_rows,
        STRIDE=x.stride(0) if x.dim() == 2 and num_rows > 1 else size,
        CENTERED=centered,
        **output,
        **row_options(size, x.device),
    )
    return out.view(x.shape) if isinstance(out, Tensor) else out


def are_columns(x: Tensor) -> bool:
    """Return whether x are rows [T, size], maybe columns of wider ones, that begin at multiples of
    `ALIGNMENT`."""
    if x.dim() != 2 or x.stride(1) != 1:
        return False
    return not (x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT)


def aligned(x: Tensor) -> Tensor:
    """Return rows contiguous and at a multiple of `ALIGNMENT`."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


register(Kernel("rms_norm", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=rms_norm))
