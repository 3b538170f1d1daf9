"""Triton prefill attention over the paged cache: ragged, causal after a prefix, online softmax (arXiv
2307.08691).

A program takes a tile of a sequence's queries, all heads that share one KV head among its rows: row i is
token i // G, head i % G. So keys and values are read once for G heads, a diagonal tile wastes little, and
short chunks still fill the matrix units. Tiles of keys that every row sees go through a loop without
masks, those on the diagonal or on the window's edge through one with masks. The host lists the tiles,
those with the most keys first, because the last to start sets the time. A sequence's bits depend on its
own chunk and context only.

Shapes: T rows of all sequences, R sequences, B blocks of a table, H heads, K kv heads, C head dimension,
G = H / K.
"""

import math

import torch
from torch import Tensor

from compress.kernels.attention_prefill.config import Config, config_of
from compress.kernels.attention_prefill.widen import widened
from compress.kernels.compilers.triton import (
    describable,
    jit,
    launch_dependents,
    pdl_enabled,
    pdl_options,
    tensor_descriptor,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.operands.block_table import block_of
from compress.kernels.operands.distance_terms import terms_by_distance, with_terms
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.operands.tiles import FixedLists, query_tiles
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.kernels.soft_cap.fused import capped


@jit()
def _attend_keys(
    q: tl.tensor,
    m: tl.tensor,
    total: tl.tensor,
    o: tl.tensor,
    positions: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    context_len: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_tiles: tl.tensor,
    v_tiles: tl.tensor,
    page_row: tl.tensor,
    terms_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    slope: tl.tensor,
    token: tl.tensor,
    head_row: tl.tensor,
    real_row: tl.tensor,
    logit_scale: tl.tensor,
    cap: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    EXTENT: tl.constexpr,
    FALLS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the softmax state (m, total, o) after the keys [first_key, end_key), whole tiles; `MASKED`
    where some row does not see some key."""
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, C_TILE)
    within = offsets[:, None] * C + columns[None, :]
    block = block_of(table_ptr, first_key, end_key, context_len, BLOCK_SIZE, TILE)
    for start in tl.range(first_key, end_key, TILE, num_stages=STAGES):
        keys = start + offsets
        slot = block.to(tl.int64) * BLOCK_SIZE + (
            start % BLOCK_SIZE if BLOCK_SIZE % TILE == 0 else keys % BLOCK_SIZE - offsets
        )
        block = block_of(
            table_ptr, start + TILE, end_key, context_len, BLOCK_SIZE, TILE
        )  # one step early: one latency, not two
        if BLOCK_SIZE % TILE == 0:
            k_at = k_ptr + slot * C + within
            v_at = v_ptr + slot * C + within
        else:
            k_at = k_ptr + (slot * C)[:, None] + within
            v_at = v_ptr + (slot * C)[:, None] + within
        if TMA and not MASKED:
            k = k_tiles.load([(page_row + slot).to(tl.int32), 0])
            v = v_tiles.load([(page_row + slot).to(tl.int32), 0])
        elif MASKED:
            mask = (keys < context_len)[:, None] & (columns < C)[None, :]
            k = tl.load(k_at, mask=mask, other=0)
            v = tl.load(v_at, mask=mask, other=0)
        elif C_TILE == C:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            mask = (columns < C)[None, :]
            k = tl.load(k_at, mask=mask, other=0)
            v = tl.load(v_at, mask=mask, other=0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            s = capped(s * logit_scale, cap)
        if EXTENT > 0:
            back = positions[:, None] - keys[None, :]
            s = with_terms(s * logit_scale, terms_ptr, growth_ptr, token, head_row, back, real_row, EXTENT)
        if FALLS:
            s = s * logit_scale - slope[:, None] * (positions[:, None] - keys[None, :]).to(tl.float32)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen &= keys[None, :] > positions[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
        s_scale = 1.0 if CAPPED or EXTENT > 0 or FALLS else logit_scale
        m_next = tl.maximum(m, tl.max(s, axis=1) * s_scale)
        m_finite = m_next
        if MASKED:
            m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s * s_scale - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
        total = total * alpha + tl.sum(p, axis=1)
        o = tl.dot(p.to(q.dtype), v, o * alpha[:, None], input_precision=PRECISION)
        m = m_next
    return m, total, o


@jit(unaligned=("table_ptr",))
def _attention_prefill(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    k_tiles: tl.tensor,
    v_tiles: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    table_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXTENT: tl.constexpr,
    FALLS: tl.constexpr,
    SINKS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Process one tile of queries and one KV head."""
    launch_dependents(PDL)
    wait(PDL)
    tile_ptr = tiles_ptr + tl.program_id(0) // K * 4
    kv_head = (tl.program_id(0) % K).to(tl.int64)
    first_token = tl.load(tile_ptr).to(tl.int64)
    num_tokens = tl.load(tile_ptr + 1)
    first_position = tl.load(tile_ptr + 2)
    sequence = tl.load(tile_ptr + 3).to(tl.int64)
    end = first_position + num_tokens

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, C_TILE)
    real_row = rows < num_tokens * G
    mask = real_row[:, None] & (columns < C)[None, :]
    positions = first_position + tl.minimum(rows // G, num_tokens - 1)
    token = first_token + rows // G
    head_row = token * K * G + kv_head * G + rows % G
    at = head_row[:, None] * C + columns[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    logit_scale = scale * 1.4426950408889634
    page_row = kv_head * head_stride // (C)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    table_ptr += sequence * table_stride

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # one more key, with a score and no value
        m = tl.load(sinks_ptr + kv_head * G + rows % G) * 1.4426950408889634
        total += 1.0
    slope = m
    if FALLS:
        slope = tl.load(slopes_ptr + kv_head * G + rows % G) * 1.4426950408889634
    o = tl.zeros([ROWS, C_TILE], tl.float32)
    # Keys on the window's edge, keys that every row sees, keys on the diagonal.
    window_start = 0
    whole_start = 0
    whole_end = (first_position + 1) // TILE * TILE
    if WINDOW > 0:
        window_start = tl.maximum(first_position + 1 - WINDOW, 0) // TILE * TILE
        whole_start = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, whole_end)
    for PART in tl.static_range(0, 3):
        if PART > 0 or WINDOW > 0:
            first_key = window_start if PART == 0 else (whole_start if PART == 1 else whole_end)
            end_key = whole_start if PART == 0 else (whole_end if PART == 1 else end)
            m, total, o = _attend_keys(
                q, m, total, o, positions, first_key, end_key, end, k_ptr, v_ptr, table_ptr, k_tiles, v_tiles,
                page_row, terms_ptr, growth_ptr, slope, token, head_row, real_row, logit_scale, cap, C,
                C_TILE, TILE, BLOCK_SIZE, WINDOW, PART != 1, CAPPED, EXTENT, FALLS, TMA, STAGES, PRECISION,
            )  # fmt: skip
    tl.store(out_ptr + at, (o / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def attention_prefill(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    relative: RelativeTerm | None = None,
    slopes_H: Tensor | None = None,
    lists: FixedLists | None = None,
) -> Tensor:
    """Return [T, H, C]; the queries of a sequence are the last of its context, whose keys and values are all
    in the pages. With `lists`, those of these chunks, the launch serves a CUDA graph."""
    config = config_of(q_THC.shape[2], q_THC.dtype)
    return attend(
        q_THC,
        kv,
        block_table_RB,
        query_lens,
        context_lens,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks_H=sinks_H,
        relative=relative,
        slopes_H=slopes_H,
        config=config,
        lists=lists,
    )


def attend(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
    config: Config,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    relative: RelativeTerm | None = None,
    slopes_H: Tensor | None = None,
    lists: FixedLists | None = None,
) -> Tensor:
    """Compute `attention_prefill` in a given configuration."""
    if kv.k_scale is not None:
        kv, block_table_RB = widened(kv, block_table_RB, context_lens, q_THC.dtype, lists)
    (num_kv_heads, _, block_size, head_dim) = kv.k.shape
    (num_rows, num_heads, _) = q_THC.shape
    group = num_heads // num_kv_heads
    assert num_rows == sum(query_lens)
    assert q_THC.is_contiguous()
    assert kv.k[0].is_contiguous()
    assert kv.k.stride() == kv.v.stride()
    tma = pdl_enabled(q_THC.device) and block_size % config.tile == 0 and describable(kv.k)
    box = [config.tile, triton.next_power_of_2(head_dim)]
    tile_loads = [tensor_descriptor(each.view(-1, head_dim), box) if tma else None for each in (kv.k, kv.v)]
    rows = max(config.rows, triton.next_power_of_2(group))
    tiles = (
        query_tiles(query_lens, context_lens, rows // group, q_THC.device)
        if lists is None
        else lists.query_tiles(rows // group)
    )
    terms_THE = None if relative is None else terms_by_distance(relative)
    out_THC = torch.empty_like(q_THC)
    _attention_prefill[(tiles.shape[0] * num_kv_heads,)](
        q_THC,
        kv.k,
        kv.v,
        block_table_RB,
        tiles,
        *tile_loads,
        out_THC,
        sinks_H,
        terms_THE,
        None if relative is None else relative.growth_T,
        slopes_H,
        block_table_RB.stride(0),
        kv.k.stride(0),
        scale,
        0.0 if softcap is None else softcap * math.log2(math.e),
        K=num_kv_heads,
        G=group,
        C=head_dim,
        C_TILE=triton.next_power_of_2(head_dim),
        ROWS=rows,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        CAPPED=softcap is not None,
        EXTENT=0 if terms_THE is None else terms_THE.shape[2],
        FALLS=slopes_H is not None,
        SINKS=sinks_H is not None,
        TMA=tma,
        STAGES=config.stages,
        PRECISION="ieee" if q_THC.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        **pdl_options(q_THC.device),
    )
    return out_THC


def supports(problem: Problem) -> str | None:
    if (problem.relative or problem.alibi) and problem.softcap:
        return "scores with terms of the distance of keys have no cap"
    return triton_refusal(problem)


register(
    Kernel(
        "attention_prefill",
        "triton.paged",
        min_sm=80,
        priority=10,
        supports=supports,
        fn=attention_prefill,
        takes_lists=True,
    )
)
