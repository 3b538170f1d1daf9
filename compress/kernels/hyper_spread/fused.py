"""The end of a half-layer with hyper-connections (arXiv 2512.24880) in one launch: every stream after it, by
the factors that `hyper_mix` left.

    s'_k = q_k y + sum_j C_jk s_j, or q_k y + s_k where streams are not mixed

Every number is computed alone, in float32 and in the order of the streams, and rounded once.

Shapes: T rows, n streams, D hidden, E = n D, F factors.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.select import Kernel, register

COLUMNS = 1024
"""Columns of a program."""


@jit()
def _spread(
    y_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    MIXED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    factors_ptr += row * (N + MIXED * N * N)
    streams_ptr += row * N * SIZE + columns
    out_ptr += row * N * SIZE + columns
    wait(PDL)
    y = tl.load(y_ptr + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        if MIXED:
            kept = tl.zeros([BLOCK], dtype=tl.float32)
            for j in tl.static_range(N):
                stream = tl.load(streams_ptr + j * SIZE, mask=mask, other=0.0).to(tl.float32)
                kept += stream * tl.load(factors_ptr + N + j * N + k)
        else:
            kept = tl.load(streams_ptr + k * SIZE, mask=mask, other=0.0).to(tl.float32)
        after = tl.load(factors_ptr + k) * y + kept
        tl.store(out_ptr + k * SIZE, after.to(out_ptr.dtype.element_ty), mask=mask)


def hyper_spread(y_TD: Tensor, streams_TE: Tensor, factors_TF: Tensor) -> Tensor:
    """Return the streams [T, n D] after a half-layer with the output y, as the reference."""
    num_rows, size = y_TD.shape
    n = streams_TE.shape[1] // size
    assert factors_TF.shape in ((num_rows, n), (num_rows, n + n * n))
    out_TE = torch.empty_like(streams_TE, memory_format=torch.contiguous_format)
    block = min(COLUMNS, triton.next_power_of_2(size))
    if num_rows:
        _spread[(num_rows, triton.cdiv(size, block))](
            y_TD.contiguous(),
            streams_TE.contiguous(),
            factors_TF,
            out_TE,
            N=n,
            MIXED=int(factors_TF.shape[1] > n),
            SIZE=size,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,  # the reference rounds products before it adds them
            **pdl_options(y_TD.device),
        )
    return out_TE


register(
    Kernel("hyper_spread", "triton.row", min_sm=80, priority=10, supports=triton_refusal, fn=hyper_spread)
)
