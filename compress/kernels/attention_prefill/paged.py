"""Triton prefill attention over the paged cache: ragged, causal behind a prefix, online softmax (arXiv 2307.08691).

A program takes a tile of a sequence's queries, all heads that share one KV head among its rows: row i is token i // G, head i % G. So
keys and values are read once for G heads, a diagonal tile wastes little, and short chunks still fill the matrix units. Tiles of keys that
every row sees go through a loop without masks, those on the diagonal or on the window's edge through one with. The host lists the tiles,
those with the most keys first, because the last to start sets the time. A sequence's bits depend on its own chunk and context only.

Shapes: T rows of all sequences, R sequences, B blocks of a table, H heads, K kv heads, C head dimension, G = H / K.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compress.kernels.e4m3 import decode_even, decode_odd, load_queries
from compress.kernels.launch import interpreted, jit, launch_dependents, pdl_enabled, pdl_options, tl, triton, triton_refusal, wait
from compress.kernels.paged import FP8_STATIC, FP8_TOKEN_HEAD, PagedKV
from compress.kernels.select import Kernel, Problem, register


@dataclass(frozen=True)
class Config:
    """Rows (query tokens times G) and keys of a tile, warps, tiles of keys in flight."""

    rows: int
    tile: int
    num_warps: int
    stages: int


def config_of(head_dim: int, dtype: torch.dtype) -> Config:
    """Fits the shared memory of sm_80 (163 KiB) too."""
    if dtype == torch.float32:
        return Config(rows=32, tile=32, num_warps=4, stages=2)
    if head_dim > 128:
        return Config(rows=64, tile=32, num_warps=4, stages=2)
    return Config(rows=128, tile=64, num_warps=4, stages=3)


@jit()
def _block_of(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end_key: tl.tensor,
    context_len: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The block of the keys [start, start + TILE), or the block of each where they lie in several."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end_key, other=0)
    else:
        keys = start + tl.arange(0, TILE)
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < context_len, other=0)


@jit()
def _attend_keys(
    q: tl.tensor,
    q_odd: tl.tensor,
    m: tl.tensor,
    total: tl.tensor,
    o: tl.tensor,
    o_odd: tl.tensor,
    positions: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    context_len: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_tiles: tl.tensor,
    v_tiles: tl.tensor,
    page_row: tl.tensor,
    logit_scale: tl.tensor,
    p_scale: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """(m, total, o, o_odd) after the keys [first_key, end_key), whole tiles; `MASKED` where some row does not see some key."""
    CODES: tl.constexpr = 1 if FORMAT == 0 else 2
    C_PAGE: tl.constexpr = C // CODES
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, C_TILE // CODES)
    within = offsets[:, None] * C_PAGE + columns[None, :]
    block = _block_of(table_ptr, first_key, end_key, context_len, BLOCK_SIZE, TILE)
    for start in tl.range(first_key, end_key, TILE, num_stages=STAGES):
        keys = start + offsets
        slot = block.to(tl.int64) * BLOCK_SIZE + (start % BLOCK_SIZE if BLOCK_SIZE % TILE == 0 else keys % BLOCK_SIZE - offsets)
        block = _block_of(table_ptr, start + TILE, end_key, context_len, BLOCK_SIZE, TILE)  # one step early: one latency, not two
        if BLOCK_SIZE % TILE == 0:
            k_at, v_at = k_ptr + slot * C_PAGE + within, v_ptr + slot * C_PAGE + within
        else:
            k_at, v_at = k_ptr + (slot * C_PAGE)[:, None] + within, v_ptr + (slot * C_PAGE)[:, None] + within
        if TMA and not MASKED:
            k = k_tiles.load([(page_row + slot).to(tl.int32), 0])
            v = v_tiles.load([(page_row + slot).to(tl.int32), 0])
        elif MASKED:
            mask = (keys < context_len)[:, None] & (columns < C_PAGE)[None, :]
            k, v = tl.load(k_at, mask=mask, other=0), tl.load(v_at, mask=mask, other=0)
        elif C_TILE == C:
            k, v = tl.load(k_at), tl.load(v_at)
        else:
            mask = (columns < C_PAGE)[None, :]
            k, v = tl.load(k_at, mask=mask, other=0), tl.load(v_at, mask=mask, other=0)
        if FORMAT == 0:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            s = tl.dot(q, tl.trans(decode_even(k, q.dtype, INTERPRETED).to(q.dtype)), input_precision=PRECISION)
            s = tl.dot(q_odd, tl.trans(decode_odd(k, q.dtype, INTERPRETED).to(q.dtype)), s, input_precision=PRECISION)
        if FORMAT == 1:
            s *= tl.load(k_scale_ptr + slot + offsets, mask=keys < context_len, other=0.0)[None, :]
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen &= keys[None, :] > positions[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, axis=1) * logit_scale)
        m_finite = m_next
        if MASKED:
            m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s * logit_scale - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
        total = total * alpha + tl.sum(p, axis=1)
        if FORMAT == 0:
            o = tl.dot(p.to(q.dtype), v, o * alpha[:, None], input_precision=PRECISION)
        else:
            p *= p_scale
            if FORMAT == 1:
                p *= tl.load(v_scale_ptr + slot + offsets, mask=keys < context_len, other=0.0)[None, :]
            weight = p.to(q.dtype)
            o = tl.dot(weight, decode_even(v, q.dtype, INTERPRETED).to(q.dtype), o * alpha[:, None], input_precision=PRECISION)
            o_odd = tl.dot(weight, decode_odd(v, q.dtype, INTERPRETED).to(q.dtype), o_odd * alpha[:, None], input_precision=PRECISION)
        m = m_next
    return m, total, o, o_odd


@jit(unaligned=("table_ptr",))
def _attention_prefill(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    k_tiles: tl.tensor,
    v_tiles: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile of queries and one KV head."""
    launch_dependents(PDL)
    wait(PDL)
    tile_ptr = tiles_ptr + tl.program_id(0) // K * 4
    kv_head = (tl.program_id(0) % K).to(tl.int64)
    first_token, num_tokens = tl.load(tile_ptr).to(tl.int64), tl.load(tile_ptr + 1)
    first_position, sequence = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3).to(tl.int64)
    end = first_position + num_tokens

    CODES: tl.constexpr = 1 if FORMAT == 0 else 2
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, C_TILE // CODES)
    mask = (rows < num_tokens * G)[:, None] & (columns < C // CODES)[None, :]
    positions = first_position + tl.minimum(rows // G, num_tokens - 1)
    at = ((first_token + rows // G) * K * G + kv_head * G + rows % G)[:, None] * C + columns[None, :] * CODES
    q, q_odd, logit_scale, p_scale, value_scale = load_queries(q_ptr + at, mask, scale, FORMAT)
    if FORMAT == 2:
        logit_scale *= tl.load(k_scale_ptr)
        value_scale *= tl.load(v_scale_ptr)
    page_row = kv_head * head_stride // (C // CODES)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    if FORMAT == 1:
        k_scale_ptr += kv_head * scale_stride
        v_scale_ptr += kv_head * scale_stride
    table_ptr += sequence * table_stride

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, C_TILE // CODES], tl.float32)
    o_odd = o
    # Keys on the window's edge, keys that every row sees, keys on the diagonal.
    window_start, whole_start, whole_end = 0, 0, (first_position + 1) // TILE * TILE
    if WINDOW > 0:
        window_start = tl.maximum(first_position + 1 - WINDOW, 0) // TILE * TILE
        whole_start = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, whole_end)
    for PART in tl.static_range(0, 3):
        if PART > 0 or WINDOW > 0:
            first_key = window_start if PART == 0 else (whole_start if PART == 1 else whole_end)
            end_key = whole_start if PART == 0 else (whole_end if PART == 1 else end)
            m, total, o, o_odd = _attend_keys(
                q, q_odd, m, total, o, o_odd, positions, first_key, end_key, end, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
                k_tiles, v_tiles, page_row, logit_scale, p_scale, C, C_TILE, TILE, BLOCK_SIZE, WINDOW, FORMAT, PART != 1, TMA, INTERPRETED, STAGES, PRECISION,
            )  # fmt: skip
    tl.store(out_ptr + at, (o * (value_scale / total)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    if FORMAT != 0:
        tl.store(out_ptr + at + 1, (o_odd * (value_scale / total)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def attention_prefill(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """[T, H, C]; the queries of a sequence are the last of its context, whose keys and values are all in the pages."""
    config = config_of(q_THC.shape[2], q_THC.dtype)
    return attend(q_THC, kv, block_table_RB, query_lens, context_lens, window=window, scale=scale, config=config)


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
) -> Tensor:
    """`attention_prefill` in a given configuration."""
    (num_kv_heads, _, block_size, head_dim), (num_rows, num_heads, _) = kv.k.shape, q_THC.shape
    group = num_heads // num_kv_heads
    assert num_rows == sum(query_lens)
    assert q_THC.is_contiguous()
    assert kv.k[0].is_contiguous()
    assert kv.k.stride() == kv.v.stride()
    k, v = (each.view(torch.int16) if kv.k_scale is not None else each for each in (kv.k, kv.v))
    tma = pdl_enabled(q_THC.device) and block_size % config.tile == 0 and k.is_contiguous()
    box = [config.tile, triton.next_power_of_2(k.shape[3])]
    tile_loads = [TensorDescriptor.from_tensor(each.view(-1, k.shape[3]), box) if tma else None for each in (k, v)]
    rows = max(config.rows, triton.next_power_of_2(group))
    tiles = _query_tiles(query_lens, context_lens, rows // group, q_THC.device)
    out_THC = torch.empty_like(q_THC)
    _attention_prefill[(tiles.shape[0] * num_kv_heads,)](
        q_THC,
        k,
        v,
        kv.k_scale,
        kv.v_scale,
        block_table_RB,
        tiles,
        *tile_loads,
        out_THC,
        block_table_RB.stride(0),
        k.stride(0),
        kv.k_scale.stride(0) if kv.format == FP8_TOKEN_HEAD and kv.k_scale is not None else 0,
        scale,
        K=num_kv_heads,
        G=group,
        C=head_dim,
        C_TILE=triton.next_power_of_2(head_dim),
        ROWS=rows,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        FORMAT={FP8_TOKEN_HEAD: 1, FP8_STATIC: 2}.get(kv.format, 0),
        TMA=tma,
        INTERPRETED=interpreted(),
        STAGES=config.stages,
        PRECISION="ieee" if q_THC.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        **pdl_options(q_THC.device),
    )
    return out_THC


@lru_cache(maxsize=4)
def _query_tiles(query_lens: tuple[int, ...], context_lens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """int32 [tiles, 4]: first row among the T, number of tokens, position of the first, sequence. The same for all layers of a step."""
    tiles, row = [], 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for start in range(0, query_len, size):
            tiles.append((row + start, min(size, query_len - start), context_len - query_len + start, sequence))
        row += query_len
    tiles.sort(key=lambda tile: tile[1] + tile[2], reverse=True)
    return torch.tensor(tiles, dtype=torch.int32).to(device)


def supports(problem: Problem) -> str | None:
    return triton_refusal(problem)


register(Kernel("attention_prefill", "triton.paged", min_sm=80, rank=10, supports=supports, fn=attention_prefill))
