"""Reference of a linear of each head: row t of head h is multiplied by the matrix of h.

The rows are those of `linear/row_product.py`, so that none depends on another.

Shapes: T rows, H heads, I inputs and O outputs of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.linear.row_product import ColumnBlocks, column_blocks, factor_dtype, row_product
from compress.kernels.select import Kernel, anything, register
from compress.models.weights import dense
from compress.quant.scheme import QuantizedWeight

ROWS = 4
"""Rows of a product on a CPU."""
CUDA_ROWS = 128


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> tuple[ColumnBlocks, ...]:
    """Return the matrices [O, I] of all heads, cut for products of rows."""
    assert not gated
    factors = factor_dtype(dtype, device)
    return tuple(column_blocks(dense(each).to(device=device, dtype=factors)) for each in weights)


def head_linear(x_THI: Tensor, packed: tuple[ColumnBlocks, ...]) -> Tensor:
    """Return [T, H, O]."""
    rows = CUDA_ROWS if x_THI.is_cuda else ROWS
    products = [
        row_product(x_TI, blocks, rows=rows) for x_TI, blocks in zip(x_THI.unbind(1), packed, strict=True)
    ]
    return torch.stack(products, dim=1).to(x_THI.dtype)


register(
    Kernel("head_linear", "reference", min_sm=0, priority=0, supports=anything, fn=head_linear, repack=repack)
)
