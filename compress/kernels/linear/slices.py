"""Decode linears of every format and size by products in slices of I (`operands/slices.cu`).

    y = act(gate(x)) * up(x) or W x, rounded to the model's dtype after the bias, plus the residual

They serve what no tuned kernel does: e4m3 weights in blocks of 128 x 128, codes of four bits in groups of 32
or 64 columns or with one scale a channel, numbers of e2m1, int8 weights of rows in 16 bits, I that is no
multiple of 128 (gpt-oss has 2,880), heads of an odd vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.linear.blocks import REPACKS, as_blocks, refusal
from compress.kernels.linear.launch import ACTIVATIONS, readable
from compress.kernels.operands.matrices import FORMATS, IN_WORDS, Matrices, MatrixFormat
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.operands.slices import SLICES, Tile, multiply, steps_of
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

MANY_ITEMS = 800
"""Items of 32 outputs and 32 rows from which a warp has all slices of its own."""
RESIDENT_BLOCKS = 264
"""Blocks of eight warps that an H200 holds at a time."""
MAX_DECODE_ROWS = 512


def tile_of(matrices: Matrices, num_rows: int, *, gated: bool) -> Tile:
    """Return the tile of decode rows. Sizes were chosen by measurement (`docs/LOG.md`, 2026-11-23; those of
    w8 and fp4 by scratch sweeps on an H100 and an H200, no result file): a warp for each slice while items
    are few, and steps under way in shared memory while rows are few. Steps of w8 are slow there: 64 rows of
    4,096 x 4,096 take 86 us, and 18 with a step in registers."""
    size = matrices.out_features // (2 if gated else 1)
    given = matrices.format
    steps = steps_of(matrices)
    wide = -(-size // 32) > RESIDENT_BLOCKS // 2
    if num_rows <= 8:
        if given == "w8":
            return Tile(1, 1, 1, 1, 8) if gated else Tile(2, 1, 2, 1, 8)
        if wide and not gated and given in IN_WORDS:
            return Tile(2, 1, min(-(-steps // SLICES), 3), 2, 8, staged=True)
        return Tile(1, 1, 2 if gated else min(-(-steps // SLICES), 3), 1, 8, staged=True)
    if num_rows <= 16:
        if gated:
            return Tile(1, 2, 1, 2 if given == "fp4" else 1, 8)
        if given == "w8":
            return Tile(2, 2, 1 if wide else 2, 1, 8)
        if given == "fp4":
            return Tile(2, 2, 1, 2 if wide else 1, 8)
        return Tile(2, 2 if wide else 1, 2, 2, 8, staged=True)
    items = -(-size // 32) * -(-num_rows // 32)
    if items >= MANY_ITEMS:
        return Tile(4 if given == "dense16" and not gated else 2, 4, 1, 2, 1, staged=given == "fp4" and gated)
    if gated:
        return Tile(1, 8 if num_rows > 32 else 4, 1, 1, 8)
    if given == "w8" or (given == "fp4" and not wide):
        return Tile(2, 8 if num_rows > 32 and not wide else 4, 1, 1, 8)
    return Tile(2 if wide or given == "w4" else 1, 4, 1, 2, 8, staged=True)


def linear(
    x: Tensor | QuantizedRows,
    packed: Any,
    bias_O: Tensor | None,
    *,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return x W^T, [T, O], or [T, O / 2] with an activation; a row's bits depend on the row alone.

    `tile` is for measuring others than the one chosen.
    """
    blocks = as_blocks(packed)
    matrices = blocks.matrices
    num_rows = x.shape[0]
    size = matrices.out_features if activation is None else matrices.out_features // 2
    device = matrices.data.device
    values, x_scale = (x.values_TK, x.scale_T.contiguous()) if isinstance(x, QuantizedRows) else (x, None)
    values = readable(values)
    zero_T = x.zero_T if isinstance(x, QuantizedRows) else None
    assert (zero_T is None) == (blocks.sum_O is None), "asymmetric rows need sums of codes, others have none"
    y_TO = torch.empty(num_rows, size, dtype=out_dtype or blocks.dtype, device=device)
    if num_rows == 0:
        return y_TO
    multiply(
        values,
        x_scale,
        matrices,
        y_TO,
        tile or tile_of(matrices, num_rows, gated=activation is not None),
        dtype=blocks.dtype,
        num_rows=num_rows,
        activation=activation,
        scale_rows=blocks.scale_rows,
        bias=bias_O,
        residual=None if residual_TO is None else residual_TO.contiguous(),
        zeros=None if zero_T is None or blocks.sum_O is None else (zero_T.contiguous(), blocks.sum_O),
    )
    return y_TO


def _refusal(problem: Problem, *, given: MatrixFormat, activation: str | None) -> str | None:
    if problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}"
    return refusal(problem, given=given, activation=activation, decode=True)


LINEARS = {
    given: [
        register(
            Kernel(
                "linear",
                ".".join(["cuda.slices", given, *([activation] if activation else [])]),
                min_sm=80,
                priority=5,
                supports=partial(_refusal, given=given, activation=activation),
                fn=partial(linear, activation=activation),
                repack=REPACKS[given],
            )
        )
        for activation in ACTIVATIONS
    ]
    for given in FORMATS
}
