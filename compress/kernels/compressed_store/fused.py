"""Triton: what `reference.py` computes in two launches: one for all heads of queries, and one for keys and
for what the cache stores besides. A row's bits depend on the row alone.

Shapes: T rows, H heads, C head dimension, R dimensions that rotate, L positions, F numbers for entries.
"""

from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    wait,
)
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.operands.turned_rows import normed_row, odd_refusal, tile_of, turn_rows, turned_pairs
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

COPIED = 1024
"""Numbers of a row that are copied at once."""


@jit(unaligned=("k_ptr", "raw_ptr", "positions_ptr", "slots_ptr"))
def _store(
    k_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    k_stride: tl.tensor,
    raw_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write one position."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C_TILE)
    real = column < C
    weight = tl.load(weight_ptr + column, mask=real, other=0.0)
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    DTYPE: tl.constexpr = pages_ptr.dtype.element_ty
    k = tl.load(k_ptr + row * k_stride + column, mask=real, other=0.0).to(tl.float32)
    k = normed_row(k, weight, eps, C, DTYPE).to(tl.float32)
    k = turned_pairs(k, cos_ptr, sin_ptr, position * table_stride, C, C_TILE, R, False)
    page_ptr = pages_ptr + slot * (C + F)
    tl.store(page_ptr + column, k.to(DTYPE), mask=real)
    for start in tl.static_range(0, F, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        raw = tl.load(raw_ptr + row * raw_stride + number, mask=number < F, other=0.0)
        tl.store(page_ptr + C + number, raw.to(DTYPE), mask=number < F)


def compressed_store(
    q_TF: Tensor,
    k_TC: Tensor,
    raw_TF: Tensor | None,
    norm: RowNorm,
    cos_LR: Tensor,
    sin_LR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
) -> Tensor:
    """Return the queries [T, H, C] and write T rows of the cache (`reference.py`)."""
    num_rows, head_dim = k_TC.shape
    assert pages.scale is None
    assert pages.rows.is_contiguous()
    num_raw = 0 if raw_TF is None else raw_TF.shape[1]
    assert pages.rows.shape[3] == head_dim + num_raw
    q_THC = turn_rows(q_TF.unflatten(1, (-1, head_dim)), cos_LR, sin_LR, positions_T, norm_eps=norm.eps)
    if num_rows == 0:
        return q_THC
    assert k_TC.stride(1) == 1
    raw_TF = k_TC if raw_TF is None else raw_TF
    assert raw_TF.stride(1) == 1
    _store[(num_rows,)](
        k_TC,
        raw_TF,
        norm.weight,
        cos_LR,
        sin_LR,
        positions_T.contiguous(),
        slots_T.contiguous(),
        pages.rows,
        k_TC.stride(0),
        raw_TF.stride(0),
        cos_LR.stride(0),
        norm.eps,
        C=head_dim,
        C_TILE=tile_of(head_dim),
        R=cos_LR.shape[1],
        F=num_raw,
        AT_ONCE=COPIED,
        num_warps=4,
        **pdl_options(k_TC.device),
    )
    return q_THC


def _refusal(problem: Problem) -> str | None:
    if problem.scheme not in DENSE_FORMATS.values():
        return "writes dense pages"
    return odd_refusal(problem)


register(
    Kernel("compressed_store", "triton.fused", min_sm=80, priority=10, supports=_refusal, fn=compressed_store)
)
