"""Triton kernel from the fused projection to rotated queries and a written cache, in one launch.

    q, k, v = split(qkv);   q, k = rope(norm(q, k));   q = q growth(position);   cache[slot] = format(k, v)

or q, k = norm(rope(q, k)). Norms of single heads may have a bias. Values that are narrower than keys are
stored with zeros up to their width.

Before the last step, q, k and v may be replaced by the Hadamard transform of their head.

The values are the last K heads of the projection, which may be its keys as well, and may be normed without a
weight. A layer that attends to the pages of an earlier one projects queries alone: no program has heads of k
or v, and nothing is written to the cache.

A program takes one row and a few neighbouring heads of it, whichever of q, k and v they belong to. A head
is held as its two halves, the partners of the rotation (`models/rope.py`), so that threads exchange
nothing but a sum of squares and a largest magnitude. Heads of q and k of which LEADING dimensions turn are
read in another order: the halves of these dimensions, and of the others, become parts of the halves of the
head. Where norms span all heads of q and of k, every program reads the row's q or k itself for their sum of
squares: a few KB from the second-level cache, and no launch of their own. Intermediates are rounded to the
model's dtype where the reference rounds them. A head's result depends on that head alone, or on those that
share its norm.

Shapes: T rows, H heads, K kv heads of the projection, C head dimension, V that of values, P positions,
F = (H + K) C + K V, or (H + K) C where the keys are the values. K is 0 in a layer without keys of its own.
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
from compress.kernels.hadamard.fused import steps_of
from compress.kernels.operands.hadamard import transformed_halves
from compress.kernels.operands.page_store import store_heads
from compress.kernels.operands.paged import CODED_FORMATS, INT4_TOKEN_HEAD, LARGEST_CODE, PagedKV
from compress.kernels.operands.rows import TINY_SCALE
from compress.kernels.problem import Problem
from compress.kernels.rope_store.turns import angles, moments, turned
from compress.kernels.select import Kernel, register
from compress.quant.kv import HADAMARD_HEAD_DIMS

TILE_SIZE = 1024
"""Elements of a program: two warps, 16 bytes of each half in a thread. It is the same for every T, and so
are the bits."""
NUM_WARPS = 2


@jit(varying=("num_positions",), unaligned=("positions_ptr", "slots_ptr"))
def _rope_store(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    num_positions: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROTATES_FIRST: tl.constexpr,
    CENTERED: tl.constexpr,
    V_NORM: tl.constexpr,
    FIRST_V: tl.constexpr,
    SPAN: tl.constexpr,
    HADAMARD: tl.constexpr,
    STEPS: tl.constexpr,
    LEADING: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Process heads [tile HEADS, ...) of one row; HALF is C / 2 rounded up to a power of two. The values of
    the row begin at its head FIRST_V. EARLY: attention may start before this launch waits
    (`attention_decode/hopper.py`)."""
    launch_dependents(PDL and EARLY)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    mask = (heads < H + 2 * K) & (columns < C // 2)
    rotated = mask & (heads < H + K)
    dtype = q_ptr.dtype.element_ty
    half = columns < C // 2
    # The tables are constant and the position nearly always stands by now: its row is fetched ahead, and
    # again should it turn out another. Both reads of it pass the first-level cache, which would remember the
    # first.
    guess = tl.minimum(
        tl.maximum(tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int64), 0), num_positions - 1
    )
    cos_first, cos_second, sin_first, sin_second = angles(cos_ptr, sin_ptr, guess, columns, half, C)
    wait(PDL)
    launch_dependents(PDL and not EARLY)
    stored = tl.where(heads < H + K, heads, heads - (H + K) + FIRST_V)
    first_shift = 0
    second_shift = C // 2
    if LEADING:
        turns = columns < LEADING // 2
        first_shift = tl.where((heads >= H + K) | turns, 0, LEADING // 2)
        second_shift = tl.where((heads < H + K) & turns, LEADING // 2, C // 2)
    at = qkv_ptr + row * row_stride + stored * C + columns
    has_first = mask
    has_second = mask
    if V < C:
        at -= tl.where(heads < H + K, 0, heads - (H + K)) * (C - V)
        has_first = mask & ((heads < H + K) | (columns < V))
        has_second = mask & ((heads < H + K) | (columns < V - C // 2))
    first = tl.load(at + first_shift, mask=has_first, other=0.0)
    second = tl.load(at + second_shift, mask=has_second, other=0.0)
    position = tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    k_scale = 1.0
    v_scale = 1.0
    if FORMAT == 2:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    if position != guess:
        cos_first, cos_second, sin_first, sin_second = angles(cos_ptr, sin_ptr, position, columns, half, C)

    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if V_NORM:
        root = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / C + eps)
        first = tl.where(rotated, first, (x * root).to(dtype))
        second = tl.where(rotated, second, (y * root).to(dtype))
    if ROTATES_FIRST:
        turned_first, turned_second = turned(x, y, cos_first, cos_second, sin_first, sin_second, dtype)
        x = turned_first.to(tl.float32)
        y = turned_second.to(tl.float32)
    if norm_ptr is not None:
        if WHOLE:
            mean = tl.zeros([HEADS, 1], tl.float32)
            square = tl.zeros([HEADS, 1], tl.float32)
            if tl.program_id(1) * HEADS < H:
                q_mean, q_square = moments(qkv_ptr + row * row_stride, H * C, CENTERED, SPAN)
                mean = tl.where(heads < H, q_mean, mean)
                square = tl.where(heads < H, q_square, square)
            if K:
                has_keys = (tl.program_id(1) + 1) * HEADS > H and tl.program_id(1) * HEADS < H + K
                if has_keys:
                    k_mean, k_square = moments(qkv_ptr + row * row_stride + H * C, K * C, CENTERED, SPAN)
                    mean = tl.where(heads < H, mean, k_mean)
                    square = tl.where(heads < H, square, k_square)
            if CENTERED:
                x -= mean
                y -= mean
            root = tl.rsqrt(square + eps)
        else:
            if CENTERED:
                mean = tl.sum(x + y, axis=1, keep_dims=True) / C
                x = tl.where(half, x - mean, 0.0)
                y = tl.where(half, y - mean, 0.0)
            root = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / C + eps)
        weight_at = norm_ptr + heads * C + columns
        weight_first = tl.load(weight_at + first_shift, mask=rotated, other=0.0).to(tl.float32)
        weight_second = tl.load(weight_at + second_shift, mask=rotated, other=0.0).to(tl.float32)
        if norm_ptr.dtype.element_ty == tl.float32:
            x = x * root * weight_first
            y = y * root * weight_second
            if bias_ptr is not None:
                bias_at = bias_ptr + heads * C + columns
                x += tl.load(bias_at + first_shift, mask=rotated, other=0.0)
                y += tl.load(bias_at + second_shift, mask=rotated, other=0.0)
            x = x.to(dtype).to(tl.float32)
            y = y.to(dtype).to(tl.float32)
        else:
            x = ((x * root).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
            y = ((y * root).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    if ROTATES_FIRST:
        turned_first = x.to(dtype)
        turned_second = y.to(dtype)
    else:
        turned_first, turned_second = turned(x, y, cos_first, cos_second, sin_first, sin_second, dtype)
    first = tl.where(rotated, turned_first, first)
    second = tl.where(rotated, turned_second, second)

    is_q = mask & (heads < H)
    if growth_ptr is not None:
        growth = tl.load(growth_ptr + position).to(tl.float32)
        first = tl.where(is_q, (first.to(tl.float32) * growth).to(dtype), first)
        second = tl.where(is_q, (second.to(tl.float32) * growth).to(dtype), second)
    if HADAMARD:
        first, second = transformed_halves(first, second, C, STEPS)
        first = first.to(dtype)
        second = second.to(dtype)
    q_at = q_ptr + (row * H + heads) * C + columns
    tl.store(q_at, first, mask=is_q)
    tl.store(q_at + C // 2, second, mask=is_q)
    if K:
        is_k = rotated & (heads >= H)
        is_v = mask & (heads >= H + K)
        if (tl.program_id(1) + 1) * HEADS > H:
            k_heads = (heads - H).to(tl.int64)
            v_heads = (heads - H - K).to(tl.int64)
            store_heads(
                k_ptr,
                k_scale_ptr,
                k_heads,
                slot,
                k_scale,
                head_stride,
                scale_stride,
                first,
                second,
                columns,
                is_k,
                C,
                FORMAT,
                LARGEST,
                TINY_SCALE,
                POWERS,
            )
            store_heads(
                v_ptr,
                v_scale_ptr,
                v_heads,
                slot,
                v_scale,
                head_stride,
                scale_stride,
                first,
                second,
                columns,
                is_v,
                C,
                FORMAT,
                LARGEST,
                TINY_SCALE,
                POWERS,
            )


def rope_store(
    qkv_TF: Tensor,
    cos_PC: Tensor,
    sin_PC: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: PagedKV,
    *,
    num_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    qk_bias: Tensor | None = None,
    whole: bool = False,
    rotates_first: bool = False,
    centered: bool = False,
    growth_P: Tensor | None = None,
    v_norm: bool = False,
    hadamard: bool = False,
    leading_dim: int = 0,
    value_dim: int | None = None,
    early: bool = False,
) -> Tensor:
    """Return q [T, H, C] and write keys and values of the T rows to the cache. `qk_norm` [H + K, C] is a
    weight for each q and k head, in the dtype of q or float32 (`RowNorm`), and so is `qk_bias`, for weights
    in float32. `qkv_TF` has H + 2 K heads, or H + K where the keys before their norm are the values, or H
    where the layer attends to the pages of an earlier one: these are `kv`, `qk_norm` is [H, C], and nothing
    is written. Where values are narrower than keys, the last K heads of it have `value_dim` dimensions."""
    num_rows = qkv_TF.shape[0]
    head_dim = kv.head_dim
    value_dim = head_dim if value_dim is None else value_dim
    num_columns = qkv_TF.shape[1] + kv.k.shape[0] * (head_dim - value_dim)
    assert num_columns % head_dim == 0
    assert not (v_norm and value_dim < head_dim)
    num_stored = num_columns // head_dim
    num_kv_heads = kv.k.shape[0] if num_stored != num_heads else 0
    assert num_stored in (num_heads + num_kv_heads, num_heads + 2 * num_kv_heads)
    assert qkv_TF.stride(1) == 1
    assert kv.k[0].is_contiguous()
    assert kv.k.stride() == kv.v.stride()
    assert not (rotates_first and (whole or leading_dim))
    assert not hadamard or head_dim in HADAMARD_HEAD_DIMS
    assert qk_norm is None or (qk_norm.is_contiguous() and qk_norm.dtype in (qkv_TF.dtype, torch.float32))
    assert qk_norm is None or qk_norm.shape == (num_heads + num_kv_heads, head_dim)
    if qk_bias is not None:
        assert qk_norm is not None
        assert not whole
        assert qk_bias.dtype == qk_norm.dtype == torch.float32
        assert qk_bias.shape == qk_norm.shape
        assert qk_bias.is_contiguous()
    pages = [each.view(torch.uint8) if kv.k_scale is not None else each for each in (kv.k, kv.v)]
    q_THC = torch.empty(num_rows, num_heads, head_dim, dtype=qkv_TF.dtype, device=qkv_TF.device)
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(1, TILE_SIZE // (2 * half))
    _rope_store[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv_TF,
        cos_PC,
        sin_PC,
        positions_T,
        slots_T,
        qk_norm,
        qk_bias,
        growth_P,
        q_THC,
        pages[0],
        pages[1],
        kv.k_scale,
        kv.v_scale,
        cos_PC.shape[0],
        qkv_TF.stride(0),
        kv.k.stride(0),
        kv.k_scale.stride(0) if kv.k_scale is not None and kv.k_scale.dim() else 0,
        eps,
        H=num_heads,
        K=num_kv_heads,
        C=head_dim,
        V=value_dim,
        HALF=half,
        HEADS=heads,
        FORMAT=CODED_FORMATS.get(kv.format, 0),
        LARGEST=LARGEST_CODE.get(kv.k.dtype, 0.0),
        TINY_SCALE=TINY_SCALE,
        POWERS=kv.power_scales,
        WHOLE=whole,
        ROTATES_FIRST=rotates_first,
        CENTERED=centered,
        V_NORM=v_norm and num_kv_heads > 0,
        FIRST_V=num_stored - num_kv_heads,
        SPAN=TILE_SIZE,
        HADAMARD=hadamard,
        STEPS=steps_of(head_dim) if hadamard else 0,
        LEADING=leading_dim,
        EARLY=early,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # fused, the products would keep the bits that the reference rounds away
        **pdl_options(qkv_TF.device),
    )
    return q_THC


def supports(problem: Problem) -> str | None:
    if problem.n % 2:
        return f"a head of {problem.n} dimensions has no halves to rotate"
    if problem.n % 4 and problem.scheme == INT4_TOKEN_HEAD:
        return f"half a head of {problem.n} dimensions is no whole number of bytes of {INT4_TOKEN_HEAD}"
    return triton_refusal(problem)


register(Kernel("rope_store", "triton.fused", min_sm=80, priority=10, supports=supports, fn=rope_store))
