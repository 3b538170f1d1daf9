"""Triton: heads whose last dimensions rotate by a position, neighbours as a pair, with a norm before it or
without (`models/compressed.py`).

Shapes: T rows, H heads, C head dimension, R dimensions that rotate, L positions of a table.
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
from compress.kernels.problem import Problem


@jit()
def turned_pairs(
    row: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    at: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    R: tl.constexpr,
    BACK: tl.constexpr,
) -> tl.tensor:
    """Return a float32 row [C_TILE], of which C numbers are real and the last R of these rotate; `at` is
    where cos and sin of the position begin."""
    pair = tl.arange(0, C_TILE // 2) - (C - R) // 2
    turning = (pair >= 0) & (pair < R // 2)
    cos = tl.load(cos_ptr + at + pair, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at + pair, mask=turning, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    even, odd = tl.split(tl.reshape(row, [C_TILE // 2, 2]))
    turned_even = tl.where(turning, even * cos - odd * sin, even)
    turned_odd = tl.where(turning, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), [C_TILE])


@jit()
def normed_row(
    row: tl.tensor, weight: tl.tensor, eps: tl.tensor, C: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return the norm of a float32 row of C numbers and zeros, rounded to DTYPE as the model rounds it:
    float32 weights are multiplied before that, others after it."""
    normed = row * tl.rsqrt(tl.sum(row * row, axis=0) / C + eps)
    if weight.dtype == tl.float32:
        return (normed * weight).to(DTYPE)
    return (normed.to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE)


@jit(unaligned=("positions_ptr",))
def _turn(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    R: tl.constexpr,
    NORMED: tl.constexpr,
    BACK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C_TILE)
    real = column < C
    wait(PDL)
    position = tl.load(positions_ptr + row // H).to(tl.int64)
    x = tl.load(x_ptr + row * C + column, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)
        x = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    turned = turned_pairs(x, cos_ptr, sin_ptr, position * table_stride, C, C_TILE, R, BACK)
    tl.store(out_ptr + row * C + column, turned.to(out_ptr.dtype.element_ty), mask=real)


def turn_rows(
    x_THC: Tensor,
    cos_LR: Tensor,
    sin_LR: Tensor,
    positions_T: Tensor,
    *,
    norm_eps: float | None = None,
    back: bool = False,
) -> Tensor:
    """Return heads rotated by the position of their row, or `back`; `norm_eps` is that of a norm without a
    weight before it, None where there is none."""
    num_rows, num_heads, head_dim = x_THC.shape
    out_THC = torch.empty(x_THC.shape, dtype=x_THC.dtype, device=x_THC.device)
    if num_rows == 0:
        return out_THC
    assert (head_dim - cos_LR.shape[1]) % 2 == 0
    assert cos_LR.stride() == sin_LR.stride()
    assert cos_LR.stride(1) == 1
    _turn[(num_rows * num_heads,)](
        x_THC.contiguous(),
        out_THC,
        cos_LR,
        sin_LR,
        positions_T.contiguous(),
        cos_LR.stride(0),
        norm_eps or 0.0,
        H=num_heads,
        C=head_dim,
        C_TILE=tile_of(head_dim),
        R=cos_LR.shape[1],
        NORMED=norm_eps is not None,
        BACK=back,
        num_warps=1 if head_dim <= 256 else 4,
        **pdl_options(x_THC.device),
    )
    return out_THC


def odd_refusal(problem: Problem) -> str | None:
    """Return why pairs of a head cannot turn here, None where they can."""
    if problem.n % 2:
        return f"turns pairs of dimensions, and heads have {problem.n}"
    return triton_refusal(problem)


def tile_of(head_dim: int) -> int:
    """Return the power of two of numbers that a program holds of a head."""
    return max(32, triton.next_power_of_2(head_dim))
