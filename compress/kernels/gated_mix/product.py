"""The beginning of a half-layer with gated residuals (`models/gated_residual.py`) for the rows of prompts:
two products of the library, and a launch each for the norms of the streams, for what silu makes of the first
product, with the factors of the output, and for the mixture.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of the gates, F = R + n, or R for the head.
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
from compress.kernels.operands.activation import activated
from compress.kernels.operands.gated import GatedMatrices, gated_matrices
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Problem
from compress.kernels.rms_norm.fused import rms_norm
from compress.kernels.select import Kernel, register

COLUMNS = 1024
"""Columns of a program."""


@jit()
def _gates(
    sums_ptr: tl.tensor,
    low_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write silu of the products of one row with W_down, and the factors of those with W_q."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(sums_ptr + row * OUT + place, mask=place < OUT, other=0.0) / N
    low = activated(x, "silu").to(low_ptr.dtype.element_ty)
    tl.store(low_ptr + row * RANK + place, low, mask=place < RANK)
    if OUT > RANK:
        injected = 2 * activated(x, "sigmoid")
        tl.store(factors_ptr + row * N + place - RANK, injected, mask=(place >= RANK) & (place < OUT))


@jit()
def _mean(
    normed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write columns of one row of the mixture, the streams added in their order."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(N):
        at = (row * N + i) * SIZE + columns
        gate = activated(tl.load(gates_ptr + at, mask=mask, other=0.0), "sigmoid")
        total += tl.load(normed_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate
    tl.store(out_ptr + row * SIZE + columns, (total / N).to(out_ptr.dtype.element_ty), mask=mask)


def gated_mix(streams_TE: Tensor, packed: GatedMatrices, norm: RowNorm) -> tuple[Tensor, Tensor | None]:
    """Return the mixture of the streams [T, D] and the factors [T, n], None for the head, as the reference
    does. A row's bits may depend on the number of rows."""
    num_rows, width = streams_TE.shape
    n, size = norm.weight.shape
    num_outputs = packed.down_FE.shape[0]
    rank = packed.up_ER.shape[1]
    assert packed.down_FE.shape[1] == packed.up_ER.shape[0] == width == n * size
    assert packed.num_factors in (0, n)
    device = streams_TE.device
    mixed_TD = torch.empty(num_rows, size, dtype=streams_TE.dtype, device=device)
    low_TR = torch.empty(num_rows, rank, dtype=streams_TE.dtype, device=device)
    factors_Tn = torch.empty(num_rows, packed.num_factors, dtype=torch.float32, device=device)
    if num_rows:
        normed = rms_norm(streams_TE.unflatten(-1, (n, size)), norm.weight, norm.eps)
        assert isinstance(normed, Tensor)
        normed_TE = normed.flatten(-2)
        options = pdl_options(device)
        _gates[(num_rows,)](
            _product(normed_TE, packed.down_FE),
            low_TR,
            factors_Tn,
            N=n,
            RANK=rank,
            OUT=num_outputs,
            BLOCK=triton.next_power_of_2(num_outputs),
            num_warps=4,
            **options,
        )
        block = min(COLUMNS, triton.next_power_of_2(size))
        _mean[(num_rows, triton.cdiv(size, block))](
            normed_TE, _product(low_TR, packed.up_ER), mixed_TD, N=n, SIZE=size, BLOCK=block, num_warps=4,
            **options,
        )  # fmt: skip
    return mixed_TD, factors_Tn if packed.num_factors else None


def _product(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Return x W^T [T, O], float32."""
    if x_TI.dtype == torch.float32 or not x_TI.is_cuda:
        return x_TI.to(torch.float32) @ w_OI.to(torch.float32).t()
    return torch.mm(x_TI, w_OI.t(), out_dtype=torch.float32)


def _refusal(problem: Problem) -> str | None:
    if problem.row_invariant:
        return "a row's bits depend on the number of rows"
    return triton_refusal(problem)


register(
    Kernel(
        "gated_mix",
        "triton.product",
        min_sm=80,
        priority=10,
        supports=_refusal,
        fn=gated_mix,
        repack=gated_matrices,
    )
)
