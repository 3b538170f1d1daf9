"""Triton linear of every format of `operands/matrices.py` but int8 (`prefill_int8.py`), and of every size,
for the rows of prompts.

    y = W x, rounded to the model's dtype after the bias, plus the residual

A program owns `bm` outputs of `bn` rows and sums over all of I in an order that depends on no tile
(`matrix_product.py`). `slices.py` serves decode rows.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.linear.blocks import REPACKS, as_blocks, refusal
from compress.kernels.operands.matrices import FORMATS, Matrices, MatrixFormat
from compress.kernels.operands.matrix_product import MIN_NATIVE_COLUMNS, Tile, e4m3_factors, product
from compress.kernels.operands.rows import FP8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def tile_of(matrices: Matrices) -> Tile:
    """Return the tile of the rows of a prompt."""
    if matrices.format == "fp8_block":
        return Tile(64, 128, matrices.step_columns(128), 4, 3)
    return Tile(128, 128, matrices.step_columns(64 if matrices.format in ("dense16", "w8") else 128), 8, 3)


@jit(varying=("num_rows",))
def _linear(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write `BM` outputs of `BN` rows."""
    launch_dependents(PDL)
    wait(PDL)
    outputs = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, OUT - 1)
    tokens = tl.program_id(1) * BN + tl.arange(0, BN)
    valid = tokens < num_rows
    blocks = (rows // SCALE_ROWS)[:, None]
    y, _ = product(
        x_ptr, x_scale_ptr, tl.minimum(tokens, num_rows - 1), valid, w_ptr, scale_ptr, offset_ptr, outer_ptr,
        tl.program_id(0) * 0, rows, rows, blocks, blocks,
        OUT, IN, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, False, STAGES, E4M3, INTERPRETED,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    at = tokens.to(tl.int64)[None, :] * OUT + outputs[:, None]
    there = valid[None, :] & (outputs < OUT)[:, None]
    y = y.to(y_ptr.dtype.element_ty)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=there)


def linear(
    x: Tensor | QuantizedRows,
    packed: Any,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T [T, O]."""
    blocks = as_blocks(packed)
    matrices = blocks.matrices
    (num_rows, _) = x.shape
    size = matrices.out_features
    tile = tile_of(matrices)
    device = matrices.data.device
    values = (x.values_TK if isinstance(x, QuantizedRows) else x).contiguous()
    x_scale = x.scale_T.contiguous() if isinstance(x, QuantizedRows) else None
    y_TO = torch.empty(num_rows, size, dtype=out_dtype or blocks.dtype, device=device)
    if num_rows == 0:
        return y_TO
    _linear[-(-size // tile.bm), -(-num_rows // tile.bn)](
        values.view(torch.uint8) if values.dtype == FP8 else values,
        x_scale,
        matrices.data,
        matrices.scale,
        matrices.offset,
        matrices.outer,
        bias_O,
        None if residual_TO is None else residual_TO.contiguous(),
        y_TO,
        num_rows,
        OUT=size,
        IN=matrices.in_features,
        BLOCKS=matrices.scale.shape[1]
        if matrices.format == "fp8_block" and matrices.scale is not None
        else 0,
        SCALE_ROWS=blocks.scale_rows,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        GROUP=matrices.group_size,
        FORMAT=FORMATS.index(matrices.format),
        ASYMMETRIC=matrices.offset is not None,
        BIAS=bias_O is not None,
        RESIDUAL=residual_TO is not None,
        STAGES=tile.num_stages,
        E4M3=e4m3_factors(device, native=tile.bk >= MIN_NATIVE_COLUMNS),
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        **pdl_options(device),
    )
    return y_TO


def _refusal(problem: Problem, *, given: MatrixFormat) -> str | None:
    if reason := triton_refusal(problem):
        return reason
    return refusal(problem, given=given, activation=None, decode=False)


LINEARS = {
    given: [
        register(
            Kernel(
                "linear",
                f"triton.{given}.prefill",
                min_sm=80,
                priority=5,
                supports=partial(_refusal, given=given),
                fn=linear,
                repack=REPACKS[given],
            )
        )
    ]
    for given in FORMATS
    if given != "int8"  # prefill_int8.py
}
