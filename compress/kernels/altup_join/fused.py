"""The row that the norm before the head reads of the streams of alternating updates (AltUp, arXiv
2301.13310) in one launch, from the first stream and the products o_k of the others with their matrices.

    x = round((s_0 + sum_k o_k |s_0| / |o_k|) / n),   |.| the root of the mean square, |o_k| >= 10^-2.5

A program computes one row, in a shape that follows from its size alone.

Shapes: T rows, n streams, D hidden, E = n D.
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
def _join(
    streams_ptr: tl.tensor,
    products: tl.tensor,  # a tuple of pointers
    out_ptr: tl.tensor,
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
    total = tl.load(streams_ptr + row * N * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    size = magnitude(total, 0.0, SIZE)
    for k in tl.static_range(1, N):
        total += matched_row(tl.load(products[k - 1] + at, mask=mask, other=0.0), size, SIZE)
    tl.store(out_ptr + at, tl.div_rn(total, N * 1.0).to(out_ptr.dtype.element_ty), mask=mask)


def altup_join(streams_TE: Tensor, products: Sequence[Tensor]) -> Tensor:
    """Return the mean [T, D] of the first of the streams [T, n D] and of the products of each other one with
    its matrix, float32 [T, D], brought to the magnitude of the first."""
    n = len(products) + 1
    num_rows, width = streams_TE.shape
    size = width // n
    for each in products:
        assert each.shape == (num_rows, size)
        assert each.dtype == torch.float32
    out_TD = torch.empty(num_rows, size, dtype=streams_TE.dtype, device=streams_TE.device)
    if num_rows:
        _join[(num_rows,)](
            aligned(streams_TE),
            tuple(map(aligned, products)),
            out_TD,
            N=n,
            **row_options(size, streams_TE.device),
        )
    return out_TD


register(Kernel("altup_join", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=altup_join))
