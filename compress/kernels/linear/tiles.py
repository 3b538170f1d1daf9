"""Reference linear: y = x W^T + b, computed in tiles of a fixed number of rows.

A GEMM library picks its blocking, and with it the order of summation, by the shape of a product, so
`row_product` calls it with one shape only, and a row's bits depend on the row alone (`row_invariant`). A
decode step has few rows and needs a small tile, prefill a large one; the two are different kernels because
their bits may differ.

A quantized weight is dequantized once, at load: it saves no bytes here, which the kernel's name
`dequantized` states. Where activations are quantized too, codes with a scale a channel are kept as numbers of
the factors' dtype, exactly, and both scales are applied to the product in float32; codes in groups are
float32 products with their scales, and so are rows in blocks whose scales are one byte."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.linear.coded import finished
from compress.kernels.linear.row_product import ColumnBlocks, column_blocks, factor_dtype, row_product
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES, QuantizedWeight

DECODE_ROWS = 4
PREFILL_ROWS = {"cpu": 48, "cuda": 256}
"""Heights of a tile. On a CPU, 4 rows serve a single request and a batch of 8 about equally well
(docs/adr/0002-cpu-row-tiles.md). On CUDA a tile of up to 256 rows is bound by weight bytes, not
arithmetic."""
MAX_DECODE_ROWS = 128
QUANTIZED = tuple(
    name for name, scheme in SCHEMES.items() if scheme.activation != "group" or scheme.scale_type is not None
)
"""All but that whose scales are applied to parts of the sum (`fp8_block.py`)."""


@dataclass(frozen=True)
class DenseWeight:
    """A weight W [I, O] for a model that computes in `dtype`, in blocks of columns.

    `scale_O` is float32 where rows are quantized, too: the scale that is applied to the product. Codes are
    float32 where `dtype` is float16, in which their sums overflow."""

    blocks: ColumnBlocks
    dtype: torch.dtype
    scale_O: Tensor | None = None


def dequantized(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> DenseWeight:
    """Stack weights [O_j, I] along O; a weight-only one is rounded to its scale's dtype first, as every
    consumer does."""
    assert not gated, "the reference applies no activation"
    coded = [
        each for each in weights if isinstance(each, QuantizedWeight) and each.scheme.activation is not None
    ]
    scales = [each.scale_OG if _by_channel(each) else torch.ones(each.shape[0]) for each in coded]
    in_float32 = dtype == torch.float16 or not all(map(_by_channel, coded))
    factors = torch.float32 if coded and in_float32 else factor_dtype(dtype, device)
    dense = [_dense(weight).to(device=device, dtype=factors) for weight in weights]
    scale_O = (
        torch.cat([each.flatten() for each in scales]).to(device=device, dtype=torch.float32)
        if scales
        else None
    )
    whole = dense[0] if len(dense) == 1 else torch.cat(dense)  # a head is large: no copy of it in between
    return DenseWeight(column_blocks(whole), dtype, scale_O)


def _dense(weight: Tensor | QuantizedWeight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    if weight.scheme.activation is None:
        return weight.dequantize()
    return weight.codes_OI.to(torch.float32) if _by_channel(weight) else weight.dequantize(torch.float32)


def _by_channel(weight: QuantizedWeight) -> bool:
    return weight.scheme.group_size is None


def linear_in_tiles(
    x: Tensor | QuantizedRows,
    packed: DenseWeight,
    bias_O: Tensor | None,
    *,
    rows: int,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return y [T, O], rounded to the model's dtype before the bias and the residual are added."""
    if isinstance(x, QuantizedRows):
        assert packed.scale_O is not None, "quantized rows need a weight whose scale is kept apart"
        in_blocks = x.scale_T.dim() == 2
        values_TK = x.dequantize(torch.float32) if in_blocks else _levels(x)
        y_TO = row_product(values_TK, packed.blocks, rows=rows).to(torch.float32)
        if not in_blocks:  # the weight's scales are ones, then
            y_TO = y_TO * x.scale_T.unsqueeze(1) * packed.scale_O
    else:
        y_TO = row_product(x, packed.blocks, rows=rows)
    y_TO = finished(y_TO, packed.dtype, bias_O, residual_TO)
    return y_TO if out_dtype is None else y_TO.to(out_dtype)


def _levels(x: QuantizedRows) -> Tensor:
    """Return the values of rows less their zero points: at most 255, exact in every dtype of factors."""
    return x.values_TK if x.zero_T is None else x.values_TK.to(torch.float32) - x.zero_T.unsqueeze(1)


def _supports(problem: Problem, *, quantized: bool, few_rows: bool, device: str | None) -> str | None:
    if problem.scheme not in (known := QUANTIZED if quantized else tuple(DENSE_SCHEMES.values())):
        return f"for {', '.join(known)}"
    return tile_refusal(problem, few_rows=few_rows, device=device)


def tile_refusal(problem: Problem, *, few_rows: bool, device: str | None) -> str | None:
    """Return why a kernel in tiles for few rows, or for many of them on a device, cannot serve a problem, or
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
            "linear",
            f"{prefix}.tile{rows}",
            min_sm=0,
            priority=0,
            supports=supports,
            fn=fn,
            repack=dequantized,
        )
    )


for _quantized, _prefix in ((False, "reference.dense"), (True, "reference.dequantized")):
    _register(_prefix, DECODE_ROWS, partial(_supports, quantized=_quantized, few_rows=True, device=None))
    for _device, _rows in PREFILL_ROWS.items():
        _register(_prefix, _rows, partial(_supports, quantized=_quantized, few_rows=False, device=_device))
