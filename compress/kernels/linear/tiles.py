"""Reference linear: y = x W^T + b, computed in tiles of a fixed number of rows.

A GEMM library picks its blocking, and with it the order of summation, by the number of rows M; torch's
linears change bits with M on CPU and on CUDA alike. Here every call to the library has the same M: the last
tile is padded with zero rows. So a row's bits depend on the row alone (`row_invariant`). A decode step has
few rows and wants a small tile, prefill a large one; the two are different kernels because their bits differ.

Tile heights, measured on one thread of a Xeon with AMX (float32, the linears of a 17 M model, 69 MB, not in
cache): tiles of 1, 2, 4, 8 and 16 rows cost 3.8, 5.4, 7.0, 8.3 and 12.1 ms, so 4 rows serve a single request
and a batch of 8 about equally well. Tiles of 64 rows reach 0.7-1.0 of the speed of one call over 2,048 rows.
On CUDA a tile of up to 256 rows is bound by weight bytes, not arithmetic.

Weights are kept dense in the compute dtype as [I, O]: multiplying by the [O, I] form costs up to 2.3 times as
much when it is in cache, because MKL then repacks it in every call. A quantized weight is dequantized once,
at load: it saves no bytes here, and the kernel's name says so. Where activations are quantized too, e4m3
codes are kept as they are in the compute dtype, exactly, and both scales are applied to the product in
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES, QuantizedWeight

DECODE_ROWS = 4
PREFILL_ROWS = {"cpu": 64, "cuda": 256}
MAX_DECODE_ROWS = 128
QUANTIZED = tuple(name for name, scheme in SCHEMES.items() if scheme.activation != "group")
"""All but those whose scales change along the sum."""
ALIGNMENT = 64
"""Bytes. MKL's bits depend on the alignment of its operands; rows of odd width put tiles off a cache line."""


@dataclass(frozen=True)
class DenseWeight:
    """w [I, O] in the compute dtype, `dtype`; `scale_O` float32 where w holds codes that its scale is yet to
    be applied to. Those stand in float32 where the compute dtype is float16, in which their sums overflow."""

    w_IO: Tensor
    dtype: torch.dtype
    scale_O: Tensor | None = None


def dequantized(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> DenseWeight:
    """Weights [O_j, I] stacked along O; a weight-only one is rounded to its scale's dtype first, as every
    consumer does."""
    assert not gated, "the reference applies no activation"
    scales = [
        each.scale_OG
        for each in weights
        if isinstance(each, QuantizedWeight) and each.scheme.activation is not None
    ]
    held = torch.float32 if scales and dtype == torch.float16 else dtype
    dense = [_dense(weight).to(device=device, dtype=held) for weight in weights]
    scale_O = torch.cat(scales).flatten().to(device=device, dtype=torch.float32) if scales else None
    return DenseWeight(torch.cat(dense).t().contiguous(), dtype, scale_O)


def _dense(weight: Tensor | QuantizedWeight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    return weight.codes_OI.to(torch.float32) if weight.scheme.activation is not None else weight.dequantize()


def linear_in_tiles(
    x: Tensor | QuantizedRows,
    packed: DenseWeight,
    bias_O: Tensor | None,
    *,
    rows: int,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, O]; every matrix product has exactly `rows` rows, at aligned addresses."""
    if isinstance(x, QuantizedRows):
        assert packed.scale_O is not None, "quantized rows need a weight whose scale is kept apart"
        y_TO = product(x.values_TK.to(packed.w_IO.dtype), packed.w_IO, rows)
        y_TO = (y_TO.to(torch.float32) * x.scale_T.unsqueeze(1) * packed.scale_O).to(packed.dtype)
    else:
        y_TO = product(x, packed.w_IO, rows)
    y_TO = y_TO if bias_O is None else y_TO + bias_O
    y_TO = y_TO if residual_TO is None else residual_TO + y_TO
    return y_TO if out_dtype is None else y_TO.to(out_dtype)


def product(x_TI: Tensor, w_IO: Tensor, rows: int) -> Tensor:
    """x W [T, O], `rows` rows at a time."""
    num_rows = x_TI.shape[0]
    short = -num_rows % rows
    # A row slice of a wider tensor has another leading dimension, to which a library may tie its choices:
    # tiles are always dense.
    x_TI = torch.cat((x_TI, x_TI.new_zeros(short, x_TI.shape[1]))) if short else x_TI.contiguous()
    if num_rows <= rows:
        y_TO = torch.mm(_aligned(x_TI), w_IO)
    else:
        y_TO = x_TI.new_empty(num_rows + short, w_IO.shape[1])
        for tile_x, tile_y in zip(torch.split(x_TI, rows), torch.split(y_TO, rows), strict=True):
            if tile_y.data_ptr() % ALIGNMENT:
                tile_y.copy_(torch.mm(_aligned(tile_x), w_IO))
            else:
                torch.mm(_aligned(tile_x), w_IO, out=tile_y)
    return y_TO[:num_rows] if short else y_TO


def _aligned(tile: Tensor) -> Tensor:
    """The tile, or a copy in fresh memory, which torch aligns."""
    return tile.clone() if tile.data_ptr() % ALIGNMENT else tile


def _supports(problem: Problem, *, quantized: bool, few_rows: bool, device: str | None) -> str | None:
    if problem.scheme not in (known := QUANTIZED if quantized else tuple(DENSE_SCHEMES.values())):
        return f"for {', '.join(known)}"
    return tile_refusal(problem, few_rows=few_rows, device=device)


def tile_refusal(problem: Problem, *, few_rows: bool, device: str | None) -> str | None:
    """Why a kernel in tiles for few rows, or for many of them on a device, cannot serve a problem, or
    None."""
    if problem.activation is not None:
        return "applies no activation"
    if device is not None and problem.device != device:
        return f"its tile height is for {device}"
    if few_rows != (problem.m_max <= MAX_DECODE_ROWS):
        return (
            f"for M up to {MAX_DECODE_ROWS}"
            if few_rows
            else f"for M above {MAX_DECODE_ROWS}, where few rows are padding"
        )
    return None


def _register(prefix: str, rows: int, supports: Callable[[Problem], str | None]) -> None:
    fn = partial(linear_in_tiles, rows=rows)
    register(
        Kernel(
            "linear", f"{prefix}.tile{rows}", min_sm=0, rank=0, supports=supports, fn=fn, repack=dequantized
        )
    )


for _quantized, _prefix in ((False, "reference.dense"), (True, "reference.dequantized")):
    _register(_prefix, DECODE_ROWS, partial(_supports, quantized=_quantized, few_rows=True, device=None))
    for _device, _rows in PREFILL_ROWS.items():
        _register(_prefix, _rows, partial(_supports, quantized=_quantized, few_rows=False, device=_device))
