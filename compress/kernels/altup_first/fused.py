"""The streams before the first layer with alternating updates (AltUp, arXiv 2301.13310) in one launch, from
the embeddings x and their products o_k with the matrices of the other streams.

    s_0 = x,   s_k = round(o_k |x| / |o_k|),   |x| the root of the mean square, |o_k| at least 10^-2.5

A program computes one row, in a shape that follows from its size alone.

Shapes: T rows, n streams, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.altup import magnitude, matched_row
from compress.kernels.quantize_rows.fused import row_options, row_refusal
from compress.kernels.rms_norm.fused import aligned
from compress.kernels.select import Kernel, register


@jit()
def _first(
    x_ptr: tl.tensor,
    products: tl.tensor,  # a tuple of pointers
    streams_ptr: tl.tensor,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    wait(PDL)
    at = row * SIZE + columns
    streams_ptr += row * N * SIZE + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    size = magnitude(x.to(tl.float32), 0.0, SIZE)
    tl.store(streams_ptr, x, mask=mask)
    for k in tl.static_range(1, N):
        other = matched_row(tl.load(products[k - 1] + at, mask=mask, other=0.0), size, SIZE)
        tl.store(streams_ptr + k * SIZE, other.to(x.dtype), mask=mask)


def altup_first(x_TD: Tensor, products: Sequence[Tensor]) -> Tensor:
    """Return the streams [T, n D] from the embeddings x, and from their products with the matrix of each
    stream but the first, float32 [T, D]."""
    num_rows, size = x_TD.shape
    n = len(products) + 1
    for each in products:
        assert each.shape == x_TD.shape
        assert each.dtype == torch.float32
    streams_TE = torch.empty(num_rows, n * size, dtype=x_TD.dtype, device=x_TD.device)
    if num_rows:
        _first[(num_rows,)](
            aligned(x_TD),
            tuple(map(aligned, products)),
            streams_TE,
            N=n,
            **row_options(size, x_TD.device),
        )
    return streams_TE


register(Kernel("altup_first", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=altup_first))
