"""Products x W whose rows do not depend on one another: a row of the result has the same bits alone, in any place, beside any other
rows.

A library chooses its code, and with it the order of summation, by the shape of a product, the alignment of its operands and the number
of threads. So every call has one shape, on addresses that begin a cache line:

    x [T, I]    in tiles of a fixed number of rows, the last one filled with zero rows; I filled up to whole cache lines
    W [I, O]    on a CPU in blocks of 48 columns, at least two, the last one filled with zero columns

Two effects remain, seen in MKL (2024.2), and the blocks avoid both. An edge: where the height or the width of a product is no whole
number of the library's inner tiles, other code computes the rest, so that two rows of one product differ in their last bits. 48 is a
whole number of inner tiles 48, 24, 16, 12, 8 and 4 wide; heights 4 and 48 hold for all instruction sets of `tests/support/emulation.py`,
heights 8, 32 and 64 do not. Threads: a product is cut for them at any row. A batched product of two matrices or more gives each matrix
to one thread (heights up to 48), so the bits do not depend on the number of threads either.

On one thread of a Xeon (AVX-512, float32, weights not in cache) blocks take 0.6 to 0.8 of the time of one product at 4 rows, and 0.8 to
1.0 at 48 rows.

bfloat16 factors stay bfloat16 where the CPU has AMX, whose products oneDNN blocks alike for every row, and are float32 elsewhere: PyTorch
multiplies 16-bit numbers 30 to 60 times as slowly as float32 on a CPU without instructions for them. CUDA has one block of all columns.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.tiles import has_bfloat16_tiles

BLOCK_COLUMNS = 48
FEWEST_BLOCKS = 2
MAX_ROWS = 48
"""Rows of a tile up to which a batched product gives each matrix to one thread."""
ALIGNMENT = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class ColumnBlocks:
    """A weight W [I, O] cut for `row_product`: `w_BIN` [B, I, N] in blocks of N columns, zeros beyond I and O; `num_columns` is O."""

    w_BIN: Tensor
    num_columns: int


def factor_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the factors of a product in `dtype` on `device`."""
    if device.type != "cpu" or (dtype == torch.bfloat16 and has_bfloat16_tiles()):
        return dtype
    return torch.float32


def column_blocks(w_OI: Tensor) -> ColumnBlocks:
    """Return a weight cut into blocks of columns of W = w_OI^T."""
    num_columns = w_OI.shape[0]
    if w_OI.is_cuda:
        return ColumnBlocks(w_OI.t().contiguous().unsqueeze(0), num_columns)
    num_blocks = max(FEWEST_BLOCKS, -(-num_columns // BLOCK_COLUMNS))
    line = ALIGNMENT // w_OI.element_size()
    w_OI = F.pad(w_OI, (0, -w_OI.shape[1] % line, 0, num_blocks * BLOCK_COLUMNS - num_columns))
    if w_OI.dtype != torch.float32:
        return ColumnBlocks(w_OI.t().contiguous().unsqueeze(0), num_columns)
    return ColumnBlocks(w_OI.view(num_blocks, BLOCK_COLUMNS, -1).transpose(1, 2).contiguous(), num_columns)


def row_product(x_TI: Tensor, weight: ColumnBlocks, *, rows: int) -> Tensor:
    """Return x W [T, O] in the dtype of the blocks, computed `rows` rows at a time."""
    w_BIN = weight.w_BIN
    num_blocks, depth, width = w_BIN.shape
    assert num_blocks == 1 or rows <= MAX_ROWS, "a library may cut higher tiles for its threads"
    num_rows = x_TI.shape[0]
    tiles = _whole_tiles(x_TI.to(w_BIN.dtype), rows, depth).split(rows)
    y_TBN = w_BIN.new_empty(rows * len(tiles), num_blocks, width)
    for tile_TI, y_tile_TBN in zip(tiles, y_TBN.split(rows), strict=True):
        if num_blocks > 1:
            y_tile_TBN.copy_(torch.bmm(tile_TI.expand(num_blocks, -1, -1), w_BIN).transpose(0, 1))
        elif y_tile_TBN.data_ptr() % ALIGNMENT:
            y_tile_TBN[:, 0].copy_(torch.mm(_aligned(tile_TI), w_BIN[0]))
        else:
            torch.mm(_aligned(tile_TI), w_BIN[0], out=y_tile_TBN[:, 0])
    return y_TBN.flatten(1)[:num_rows, : weight.num_columns].contiguous()


def _whole_tiles(x_TI: Tensor, rows: int, depth: int) -> Tensor:
    """Return x with zero rows up to a whole number of tiles and zero columns up to `depth`, contiguous and aligned."""
    num_rows, num_columns = x_TI.shape
    if num_rows % rows or num_columns < depth:
        return F.pad(x_TI, (0, depth - num_columns, 0, -num_rows % rows))
    return _aligned(x_TI.contiguous())


def _aligned(x_TI: Tensor) -> Tensor:
    """Return x, or a copy in fresh memory, which torch aligns."""
    return x_TI.clone() if x_TI.data_ptr() % ALIGNMENT else x_TI
