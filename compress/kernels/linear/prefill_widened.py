"""Linear of many rows over codes that a kernel widens to 16 bits on its way to the tensor cores: here the
weight is dequantized once for all rows, piece by piece, and cuBLAS multiplies.

    y[:, p] = x W[p]^T,   W[p] = round((codes - zero points) scale) of the output rows p of one piece

A product that widens its codes itself does so for every 128 rows, and is bound by that: 200 to 500 TFLOP/s
over 2,048 rows on an H100, where cuBLAS has 717 (`bench_kernels`, commit 9122fb1e). Fewer rows have such a
product still, that of Triton (`general.py`) or of Hopper's decode rows, because a dequantized weight is
written and read again. Formats and layouts are those of `operands/matrices.py` and of `w8a16.py`; pieces are
as in `prefill_w4a16.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton_refusal, wait
from compress.kernels.linear import general
from compress.kernels.linear.blocks import Blocks, repack
from compress.kernels.linear.blocks import refusal as refuse_format
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.prefill_dense16 import library_refusal
from compress.kernels.linear.prefill_w4a16 import MIN_PIECE_ROWS, SCRATCH_BYTES
from compress.kernels.operands.matrices import BLOCK, FORMATS, TILE, MatrixFormat, whole_blocks
from compress.kernels.operands.matrix_product import e2m1_values
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

WIDENED: tuple[MatrixFormat, ...] = ("w4", "fp4", "w8")
MIN_ROWS = 384
"""Fewest rows for which the weight is dequantized first: of int8 weights of 28,672 x 4,096, 384 rows take 276
us on an H100 and 278 if the product widens them, 256 rows 249 and 187; other shapes, and numbers of e2m1,
gain from 256 rows on. `hopper.cu` takes 35 us for each 64 rows of that weight on an H200."""
BLOCKS_EACH = 4
"""Blocks of 128 columns of a program."""


@jit()
def _dequantize(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    IN: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Dequantize 16 output rows x `EACH` blocks of 128 columns; COLUMNS are those stored."""
    launch_dependents(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    local = tl.program_id(0) * 16 + tl.arange(0, 16)
    rows = first_row + local
    there = local < num_rows
    outer = tl.full([16], 1.0, tl.float32)
    if FORMAT == 5:
        outer = tl.load(scale_ptr + rows, mask=there, other=0.0)
    elif outer_ptr is not None:
        outer = tl.load(outer_ptr + rows, mask=there, other=0.0)
    wait(PDL)
    for part in tl.static_range(EACH):
        block = tl.program_id(1) * EACH + part
        if FORMAT == 5:
            columns = block * 128 + tl.arange(0, 128)
            mask = there[:, None] & (columns < IN)[None, :]
            codes = tl.load(
                codes_ptr + rows.to(tl.int64)[:, None] * IN + columns[None, :], mask=mask, other=0
            )
            number = codes.to(tl.float32)
            if INTERLEAVED:
                steps = tl.permute(tl.reshape(number - 128, [16, 8, 4, 2, 2]), [0, 1, 3, 2, 4])
                number = tl.reshape(steps, [16, 128])
            value = number * outer[:, None]
            tl.store(
                out_ptr + local.to(tl.int64)[:, None] * IN + columns[None, :], value.to(DTYPE), mask=mask
            )
        else:
            inside = there & (block * 128 < COLUMNS)
            words_at = (rows // 16).to(tl.int64) * (COLUMNS * 4) + rows % 16 * 32 + block.to(tl.int64) * 512
            words = tl.load(
                codes_ptr + words_at[:, None] + tl.arange(0, 32)[None, :], mask=inside[:, None], other=0
            ).to(tl.int32)
            scale_row = (rows // 16).to(tl.int64) * (COLUMNS // GROUP * 16) + rows % 16
            for i in tl.static_range(4):
                columns = block * 128 + i * 32 + tl.arange(0, 32)
                scale_at = scale_row[:, None] + (columns // GROUP * 16)[None, :]
                scale = tl.load(scale_ptr + scale_at, mask=inside[:, None], other=0.0).to(tl.float32)
                nibbles = (words >> (4 * i)) & 0xF
                if FORMAT == 6:
                    value = e2m1_values(nibbles)
                elif offset_ptr is None:
                    value = nibbles.to(tl.float32) - 8
                else:
                    added = 128.0 if DTYPE is tl.bfloat16 else 1024.0
                    offset = tl.load(offset_ptr + scale_at, mask=inside[:, None], other=0.0).to(tl.float32)
                    value = nibbles.to(tl.float32) + added + offset
                value = value * scale * outer[:, None]
                at = local.to(tl.int64)[:, None] * IN + columns[None, :]
                tl.store(out_ptr + at, value.to(DTYPE), mask=inside[:, None] & (columns < IN)[None, :])


def dequantize(blocks: Blocks, first_row: int, num_rows: int, scratch: Tensor | None = None) -> Tensor:
    """Return the output rows [first_row, first_row + num_rows) of a weight, [num_rows, I] in its dtype, in
    `scratch` if it is given, which must have at least as many rows."""
    matrices = blocks.matrices
    if scratch is None:
        scratch = torch.empty(num_rows, matrices.in_features, dtype=blocks.dtype, device=matrices.data.device)
    _dequantize[-(-num_rows // TILE), -(-matrices.in_features // (BLOCK * BLOCKS_EACH))](
        matrices.data,
        matrices.scale,
        matrices.offset,
        matrices.outer,
        scratch,
        first_row,
        num_rows,
        IN=matrices.in_features,
        COLUMNS=whole_blocks(matrices.in_features),
        GROUP=matrices.group_size,
        FORMAT=FORMATS.index(matrices.format),
        INTERLEAVED=blocks.interleaved,
        EACH=BLOCKS_EACH,
        num_warps=4,
        **pdl_options(scratch.device),
    )
    return scratch[:num_rows]


def pieces(blocks: Blocks) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of each piece and its weight. Pieces share memory: a piece is valid until the next
    one is taken."""
    size = blocks.matrices.out_features
    most = max(SCRATCH_BYTES // (2 * blocks.matrices.in_features), MIN_PIECE_ROWS)
    step = -(-size // -(-size // most) // TILE) * TILE
    scratch = None
    for first in range(0, size, step):
        w_PI = dequantize(blocks, first, min(step, size - first), scratch)
        scratch = w_PI if scratch is None else scratch
        yield first, w_PI


def linear(
    x_TI: Tensor,
    packed: Blocks,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T [T, O]."""
    num_rows = x_TI.shape[0]
    added: dict[str, Any] = {"residual_TO": residual_TO, "out_dtype": out_dtype}
    if num_rows < MIN_ROWS:
        if packed.interleaved:
            return multiply(x_TI, packed.kernel_weight, bias_O, dtype=packed.dtype, activation=None, **added)
        return general.linear(x_TI, packed, bias_O, **added)
    wider = {} if out_dtype in (None, x_TI.dtype) else {"out_dtype": out_dtype}
    size = packed.matrices.out_features
    y_TO = torch.empty(num_rows, size, dtype=out_dtype or x_TI.dtype, device=x_TI.device)
    for first, w_PI in pieces(packed):
        torch.mm(x_TI, w_PI.t(), out=y_TO[:, first : first + w_PI.shape[0]], **wider)
    y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
    return y_TO if residual_TO is None else y_TO.add_(residual_TO)


def refusal(problem: Problem, *, given: MatrixFormat) -> str | None:
    """Refuse what neither cuBLAS nor a linear of every size serves."""
    if reason := library_refusal(problem) or triton_refusal(problem):
        return reason
    return refuse_format(problem, given=given, activation=None, decode=False)


for _given in WIDENED:
    register(
        Kernel(
            "linear",
            f"{_given}.dequantize",
            min_sm=80,
            priority=7,
            supports=partial(refusal, given=_given),
            fn=linear,
            repack=repack,
        )
    )
