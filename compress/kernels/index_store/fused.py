"""Triton: turns the queries of an indexer and writes its keys to the cache in one launch (`reference.py` has
the definition).

A program takes a few heads of the queries of one row, or the row that the cache stores and the factors of the
heads. Columns are read in the order in which they are written, those that rotate first, and next to each the
column that turns with it; a key and what turns with it are normed alike, so that no column is exchanged
between threads. Numbers are rounded where the reference rounds them. The norm of a key sums its row in an
order that does not depend on where the row lies, so that a row's bits depend on the row alone.

Shapes: T rows, H heads, I numbers of a key, L positions, P dimensions that rotate.
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
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.kernels.operands.rows import RowNorm
from compress.kernels.select import Kernel, register
from compress.models.indexer import Indexer

TILE_SIZE = 1024
"""Numbers of queries of a program."""


@jit()
def _read_at(
    d: tl.tensor, WIDTH: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, LAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return which columns of a head become columns d, of which the first P rotate, and which turn with
    them."""
    HALF: tl.constexpr = P // 2 if P > 0 else 1  # with P = 0 no column rotates
    pair = d % HALF
    begin = WIDTH - P if LAST else 0
    first = begin + (pair * 2 if INTERLEAVED else pair)
    second = begin + (pair * 2 + 1 if INTERLEAVED else pair + HALF)
    still = d - P if LAST else d
    own = tl.where(d < P, tl.where(d < HALF, first, second), still)
    return own, tl.where(d < P, tl.where(d < HALF, second, first), still)


@jit()
def _turned(
    own: tl.tensor, other: tl.tensor, cos: tl.tensor, sin: tl.tensor, d: tl.tensor, P: tl.constexpr
) -> tl.tensor:
    """Return columns d of heads, rounded as the reference does, from those before they rotate."""
    dtype: tl.constexpr = own.dtype
    straight = (own.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
    across = (other.to(tl.float32) * sin.to(tl.float32)).to(dtype).to(tl.float32)
    rotated = tl.where(d < P // 2, straight - across, straight + across).to(dtype)
    return tl.where(d < P, rotated, own)


@jit(unaligned=("k_ptr", "gate_ptr", "positions_ptr", "slots_ptr"))
def _index_store(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    logs_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    gate_stride: tl.tensor,
    weights_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    score_scale: tl.tensor,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LAST: tl.constexpr,
    CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    H_TILE: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Process heads [tile HEADS, ...) of one row, or what its position stores and the factors of its heads in
    the program after those."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_TILE)
    real = d < WIDTH
    turns = d < P
    own_at, other_at = _read_at(d, WIDTH, P, INTERLEAVED, LAST)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        given = (head < H) & real[None, :]
        if growth_ptr is not None:
            scale = tl.load(growth_ptr + head, mask=head < H, other=0.0).to(tl.float32)
            base = tl.load(growth_ptr + H + head, mask=head < H, other=0.0).to(tl.float32)
        wait(PDL)
        position = tl.load(positions_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * table_stride + d, mask=turns, other=0.0)
        sin = tl.load(sin_ptr + position * table_stride + d, mask=turns, other=0.0)
        head_ptr = q_ptr + row * q_stride + head * WIDTH
        q = tl.load(head_ptr + own_at[None, :], mask=given, other=0.0)
        q_other = tl.load(head_ptr + other_at[None, :], mask=given, other=0.0)
        if growth_ptr is not None:
            log = tl.load(logs_ptr + position).to(tl.float32)
            growth = (scale * log).to(DTYPE).to(tl.float32) + base
            growth = growth.to(DTYPE).to(tl.float32)
            q = (q.to(tl.float32) * growth).to(DTYPE)
            q_other = (q_other.to(tl.float32) * growth).to(DTYPE)
        q = _turned(q, q_other, cos[None, :], sin[None, :], d[None, :], P)
        tl.store(out_ptr + (row * H + head) * WIDTH + d[None, :], q, mask=given)
    else:
        every = tl.arange(0, H_TILE)
        weight = tl.load(norm_ptr + own_at, mask=real, other=0.0)
        bias = tl.load(bias_ptr + own_at, mask=real, other=0.0)
        weight_other = tl.load(norm_ptr + other_at, mask=real, other=0.0)
        bias_other = tl.load(bias_ptr + other_at, mask=real, other=0.0)
        wait(PDL)
        position = tl.load(positions_ptr + row).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * table_stride + d, mask=turns, other=0.0)
        sin = tl.load(sin_ptr + position * table_stride + d, mask=turns, other=0.0)
        k = tl.load(k_ptr + row * k_stride + own_at, mask=real, other=0.0).to(tl.float32)
        k_other = tl.load(k_ptr + row * k_stride + other_at, mask=real, other=0.0).to(tl.float32)
        if CENTERED:
            mean = tl.sum(k, axis=0) / WIDTH
            k = tl.where(real, k - mean, 0.0)
            k_other = k_other - mean
        quotient = tl.rsqrt(tl.sum(k * k, axis=0) / WIDTH + eps)
        normed = (k * quotient * weight + bias).to(DTYPE)
        normed_other = (k_other * quotient * weight_other + bias_other).to(DTYPE)
        turned_k = _turned(normed, normed_other, cos, sin, d, P)
        if gate_ptr is None:
            tl.store(pages_ptr + slot * WIDTH + d, turned_k, mask=real)
        else:
            gate = tl.load(gate_ptr + row * gate_stride + d, mask=real, other=0.0)
            tl.store(pages_ptr + slot * (2 * WIDTH) + d, turned_k, mask=real)
            tl.store(pages_ptr + slot * (2 * WIDTH) + WIDTH + d, gate, mask=real)
        factors = tl.load(weights_ptr + row * weights_stride + every, mask=every < H, other=0.0)
        tl.store(factors_ptr + row * H + every, factors * score_scale, mask=every < H)


def index_store(
    q_TF: Tensor,
    k_TI: Tensor,
    weights_TH: Tensor,
    norm: RowNorm,
    cos_LP: Tensor,
    sin_LP: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
    *,
    facts: Indexer,
    gate_TI: Tensor | None = None,
    growth: QueryGrowth | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the queries [T, H, I] and the factors of heads [T, H], and write T rows of the cache, as the
    reference; all rows may be columns of wider ones."""
    num_rows = len(q_TF)
    num_heads = facts.num_heads
    width = facts.head_dim
    assert q_TF.shape[1] == num_heads * width
    assert k_TI.shape[1] == width
    assert weights_TH.shape[1] == num_heads
    assert weights_TH.dtype == norm.weight.dtype == torch.float32
    assert norm.bias is not None
    assert norm.bias.dtype == torch.float32
    assert pages.scale is None
    assert pages.rows.is_contiguous()
    assert pages.rows.dtype == k_TI.dtype == q_TF.dtype
    assert pages.rows.shape[3] == (width if gate_TI is None else 2 * width)
    assert cos_LP.stride() == sin_LP.stride()
    assert all(each.stride(1) == 1 for each in (q_TF, k_TI, weights_TH))
    assert gate_TI is None or gate_TI.stride(1) == 1
    q_THI = q_TF.new_empty(num_rows, num_heads, width)
    factors_TH = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q_TF.device)
    tile = triton.next_power_of_2(width)
    heads = max(1, TILE_SIZE // tile)
    if num_rows:
        _index_store[(num_rows, triton.cdiv(num_heads, heads) + 1)](
            q_TF,
            k_TI,
            gate_TI,
            weights_TH,
            norm.weight,
            norm.bias,
            cos_LP,
            sin_LP,
            None if growth is None else growth.logs_L,
            None if growth is None else growth.heads_2H.contiguous(),
            positions_T.contiguous(),
            slots_T.contiguous(),
            q_THI,
            factors_TH,
            pages.rows,
            q_TF.stride(0),
            k_TI.stride(0),
            0 if gate_TI is None else gate_TI.stride(0),
            weights_TH.stride(0),
            cos_LP.stride(0),
            norm.eps,
            facts.score_scale,
            H=num_heads,
            WIDTH=width,
            P=cos_LP.shape[1],
            INTERLEAVED=facts.interleaved,
            LAST=facts.rope_last,
            CENTERED=norm.centered,
            HEADS=heads,
            H_TILE=triton.next_power_of_2(num_heads),
            WIDTH_TILE=tile,
            num_warps=4,
            **pdl_options(q_TF.device),
        )
    return q_THI, factors_TH


register(
    Kernel("index_store", "triton.fused", min_sm=80, priority=10, supports=triton_refusal, fn=index_store)
)
