"""Products x W whose rows do not depend on one another: a row of the result has the same bits alone, in any
place and next to any other rows.

A library chooses its code, and with it the order of summation, by the shape of a product, the alignment of
its operands and the number of threads. So every call has one shape, on addresses that begin a cache line:

    x [T, I]    in tiles of a fixed number of rows; zeros fill the last tile, and I up to whole cache lines
    W [I, O]    on a CPU in blocks of 48 columns, two or more; zeros fill the last block

Two effects remain, both seen in MKL 2024.2, and the blocks prevent both. Edges: where the height or the
width of a product is no multiple of the library's inner tiles, other code computes the rest, and rows of
one product differ in their last bits. 48 is a multiple of inner tiles of 48, 24, 16, 12, 8 and 4 columns.
Heights of 4 and 48 rows hold for every instruction set of `tests/support/emulation.py`; heights of 8, 32
and 64 rows do not. Threads: a library cuts a product for its threads at any row. But it gives each matrix
of a batched product to one thread (two or more matrices of up to 48 rows), so the bits do not depend on the
number of threads either.

bfloat16 factors stay bfloat16 on a CPU with AMX, where oneDNN blocks all rows alike. On other CPUs factors
are float32: without instructions for them, PyTorch multiplies 16-bit numbers 30 to 60 times more slowly
than float32. CUDA has one block of all columns. Measurements are in docs/adr/0002-cpu-row-tiles.md."""

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
    """A weight W [I, O] cut for `row_product` into B blocks of N columns, [B, I, N], with zeros beyond I
    and O. `num_columns` is O."""

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
    missing = (0, -w_OI.shape[1] % line, 0, num_blocks * BLOCK_COLUMNS - num_columns)
    w_OI = F.pad(w_OI, missing) if any(missing) else w_OI
    if w_OI.dtype != torch.float32:
        return ColumnBlocks(w_OI.t().contiguous().unsqueeze(0), num_columns)
    return ColumnBlocks(w_OI.view(num_blocks, BLOCK_COLUMNS, -1).transpose(1, 2).contiguous(), num_columns)


def row_product(x_TI: Tensor, weight: ColumnBlocks, *, rows: int) -> Tensor:
    """Return x W [T, O] in the dtype of the blocks, computed `rows` rows at a time."""
    w_BIN = weight.w_BIN
    num_blocks, depth, width = w_BIN.shape
    assert num_blocks == 1 or rows <= MAX_ROWS, "a library may cut higher tiles for its threads"
    num_rows = x_TI.shape[0]
    x_TI = _whole_tiles(x_TI.to(w_BIN.dtype), rows, depth)
    if num_blocks > 1:
        tiles = x_TI.expand(num_blocks, -1, -1).split(rows, dim=1)
        y_TBN = torch.cat([torch.bmm(tile_BTI, w_BIN).transpose(0, 1) for tile_BTI in tiles])
        return y_TBN.flatten(1)[:num_rows, : weight.num_columns].contiguous()
    y_TN = w_BIN.new_empty(x_TI.shape[0], width)
    for tile_TI, y_tile_TN in zip(x_TI.split(rows), y_TN.split(rows), strict=True):
        if y_tile_TN.data_ptr() % ALIGNMENT:
            y_tile_TN.copy_(torch.mm(_aligned(tile_TI), w_BIN[0]))
        else:
            torch.mm(_aligned(tile_TI), w_BIN[0], out=y_tile_TN)
    return y_TN[:num_rows, : weight.num_columns].contiguous()


def _whole_tiles(x_TI: Tensor, rows: int, depth: int) -> Tensor:
    """Return x, contiguous and aligned, with zero rows up to whole tiles and zero columns up to `depth`."""
    num_rows, num_columns = x_TI.shape
    if num_rows % rows or num_columns < depth:
        return F.pad(x_TI, (0, depth - num_columns, 0, -num_rows % rows))
    return _aligned(x_TI.contiguous())


def _aligned(x_TI: Tensor) -> Tensor:
    """Return x, or a copy in fresh memory, which torch aligns."""
    return x_TI.clone() if x_TI.data_ptr() % ALIGNMENT else x_TI
