"""Triton decode attention over the paged cache: keys in fixed absolute chunks, chunks in any program, one
order of summation.

    chunk j covers positions [j N, (j + 1) N)
    s = q k^T scale log2(e),  m_j = max s,  l_j = sum 2^(s - m_j),  o_j = 2^(s - m_j) v
    m = max_j m_j,            out = sum_j 2^(m_j - m) o_j / sum_j 2^(m_j - m) l_j

With a cap c, c log2(e) tanh(s / (c log2(e))) takes the place of s; with slopes m, s - m log2(e) d does for
keys at distance d.

Two launches (split-KV decoding, arXiv 2311.01282). The first has P programs for every request and KV
head, which walk the chunks p, p + P, ... in tiles and write each chunk's (m, l, o) in float32; all query
heads of the KV head and all `q_len` queries are rows of one matrix product. The second adds the chunks of
a row up, `MERGE_CHUNKS` at a time by a tree that is fixed over absolute chunks.

A row's bits depend on its request alone: the code, the shape of the tiles and the partition of the
context are the same for every number of requests, of programs and of queries, and a chunk or key that a
row does not see adds exactly zero. The host needs no context length, so one CUDA graph serves all.

Shapes: T rows = R q_len, R requests, B blocks of a table, H heads, K kv heads, C head dimension, G = H /
K.
"""

import math

import torch
from torch import Tensor

from compress.kernels.attention_decode.config import CONFIG as CONFIG
from compress.kernels.attention_decode.config import Config, config_of
from compress.kernels.attention_decode.merge import merge_chunks
from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.operands.block_table import block_of
from compress.kernels.operands.distance_terms import terms_by_distance, with_terms
from compress.kernels.operands.page_codes import even_codes, load_queries, odd_codes, offset_sum
from compress.kernels.operands.paged import CODED_FORMATS, PagedKV
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.operands.rows import FP8
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.kernels.soft_cap.fused import capped

MAX_Q_LEN = 8


@jit(varying=("q_len",), unaligned=("table_ptr", "lens_ptr"))
def _attend_chunks(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    growth_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    o_ptr: tl.tensor,
    ml_ptr: tl.tensor,
    table_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    max_chunks: tl.tensor,
    q_len: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    CAPPED: tl.constexpr,
    EXTENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """o [R, K, J, q_len G, C] and (m, l) [R, K, J, q_len G, 2] of the chunks J of this program."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.program_id(1) // K
    kv_head = tl.program_id(1) % K
    # Codes come in pairs, even dimensions in the low half and odd ones in the high: loads of two bytes, or of
    # one that holds two codes, and two products instead of one.
    CODES: tl.constexpr = 1 if FORMAT == 0 else 2
    C_PAGE: tl.constexpr = C // CODES
    columns = tl.arange(0, C_TILE // CODES)
    real_row = rows < q_len * G
    real_column = columns < C_PAGE
    offsets = tl.arange(0, TILE)
    within = offsets[:, None] * C_PAGE + columns[None, :]
    row_mask = real_row[:, None] & real_column[None, :]
    table_ptr += request.to(tl.int64) * table_stride
    wait(PDL)
    context_len = tl.load(lens_ptr + request).to(tl.int32)
    if WINDOW > 0:
        first_position = tl.maximum(context_len - q_len + 1 - WINDOW, 0)
        first_chunk = first_position // CHUNK + tl.program_id(2)
        block = block_of(table_ptr, first_chunk * CHUNK, context_len, context_len, BLOCK_SIZE, TILE)
    else:
        first_position = 0
        first_chunk = tl.program_id(2)  # within the table: loaded beside the length, not after it
        block = block_of(
            table_ptr,
            first_chunk * CHUNK,
            first_chunk * CHUNK + TILE,
            first_chunk * CHUNK + TILE,
            BLOCK_SIZE,
            TILE,
        )
    num_chunks = tl.cdiv(tl.maximum(tl.cdiv(context_len, CHUNK) - first_chunk, 0), tl.num_programs(2))
    if num_chunks == 0:
        return
    positions = context_len - q_len + rows // G
    token = request.to(tl.int64) * q_len + rows // G
    q_at = q_ptr + (token * K * G + kv_head * G + rows % G)[:, None] * C + columns[None, :] * CODES
    q, q_odd, logit_scale, p_scale, value_scale = load_queries(q_at, row_mask, scale, FORMAT)
    if FORMAT == 2:
        logit_scale *= tl.load(k_scale_ptr)
        value_scale *= tl.load(v_scale_ptr)
    k_ptr += kv_head.to(tl.int64) * head_stride
    v_ptr += kv_head.to(tl.int64) * head_stride
    if FORMAT == 1 or FORMAT > 2:
        k_scale_ptr += kv_head.to(tl.int64) * scale_stride
        v_scale_ptr += kv_head.to(tl.int64) * scale_stride
    slope = tl.zeros([ROWS], tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + kv_head * G + rows % G, mask=real_row, other=0.0) * 1.4426950408889634
    part = (request * K + kv_head).to(tl.int64) * max_chunks * (q_len * G)

    no_keys = 0.0
    if FORMAT > 2:
        no_keys = -offset_sum(q, q.dtype, FORMAT) - offset_sum(q_odd, q.dtype, FORMAT)
    TILES: tl.constexpr = CHUNK // TILE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, C_TILE // CODES], tl.float32)
    o_odd = o
    for step in tl.range(0, num_chunks * TILES, num_stages=STAGES):
        chunk = first_chunk + step // TILES * tl.num_programs(2)
        start = chunk * CHUNK + step % TILES * TILE
        keys = start + offsets
        real_key = (keys < context_len) & (keys >= first_position)
        mask = real_key[:, None] & real_column[None, :]
        slot = block.to(tl.int64) * BLOCK_SIZE + (
            start % BLOCK_SIZE if BLOCK_SIZE % TILE == 0 else keys % BLOCK_SIZE - offsets
        )
        # The id of the next block is loaded one step early: keys then wait for one load and not for two.
        next_start = (first_chunk + (step + 1) // TILES * tl.num_programs(2)) * CHUNK + (
            step + 1
        ) % TILES * TILE
        block = block_of(table_ptr, next_start, context_len, context_len, BLOCK_SIZE, TILE)
        if BLOCK_SIZE % TILE == 0:
            k_at = k_ptr + slot * C_PAGE + within
            v_at = v_ptr + slot * C_PAGE + within
        else:
            k_at = k_ptr + (slot * C_PAGE)[:, None] + within
            v_at = v_ptr + (slot * C_PAGE)[:, None] + within
        if FORMAT == 0:
            k = tl.load(k_at, mask=mask, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            codes = tl.load(k_at, mask=mask, other=0)
            s = tl.dot(
                q, tl.trans(even_codes(codes, q.dtype, FORMAT, INTERPRETED)), input_precision=PRECISION
            )
            s = tl.dot(
                q_odd,
                tl.trans(odd_codes(codes, q.dtype, FORMAT, INTERPRETED)),
                s,
                input_precision=PRECISION,
            )
        if FORMAT > 2:
            s += no_keys
        s *= logit_scale
        if FORMAT == 1 or FORMAT > 2:
            s *= tl.load(k_scale_ptr + slot + offsets, mask=real_key, other=0.0)[None, :]
        if CAPPED:
            s = capped(s, cap)
        if EXTENT > 0:
            back = positions[:, None] - keys[None, :]
            head_row = token * (K * G) + kv_head * G + rows % G
            s = with_terms(s, terms_ptr, growth_ptr, token, head_row, back, real_row, EXTENT)
        if slopes_ptr is not None:
            s -= slope[:, None] * (positions[:, None] - keys[None, :]).to(tl.float32)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= keys[None, :] > positions[:, None] - WINDOW
        s = tl.where(seen, s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, axis=1))
        m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
        total = total * alpha + tl.sum(p, axis=1)
        if FORMAT == 0:
            v = tl.load(v_at, mask=mask, other=0.0)
            o = tl.dot(p.to(q.dtype), v, o * alpha[:, None], input_precision=PRECISION)
        else:
            p *= p_scale
            if FORMAT == 1 or FORMAT > 2:
                p *= tl.load(v_scale_ptr + slot + offsets, mask=real_key, other=0.0)[None, :]
            codes = tl.load(v_at, mask=mask, other=0)
            weight = p.to(q.dtype)
            o *= alpha[:, None]
            o_odd *= alpha[:, None]
            if FORMAT > 2:
                no_values = offset_sum(weight, q.dtype, FORMAT)
                o -= no_values
                o_odd -= no_values
            even = even_codes(codes, q.dtype, FORMAT, INTERPRETED)
            odd = odd_codes(codes, q.dtype, FORMAT, INTERPRETED)
            o = tl.dot(weight, even, o, input_precision=PRECISION)
            o_odd = tl.dot(weight, odd, o_odd, input_precision=PRECISION)
        m = m_next
        if step % TILES == TILES - 1:
            row = part + chunk.to(tl.int64) * (q_len * G) + rows
            o_at = o_ptr + row[:, None] * C + columns[None, :] * CODES
            tl.store(o_at, o * value_scale, mask=row_mask)
            if FORMAT != 0:
                tl.store(o_at + 1, o_odd * value_scale, mask=row_mask)
            tl.store(ml_ptr + row * 2, m, mask=real_row)
            tl.store(ml_ptr + row * 2 + 1, total, mask=real_row)
            m = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            o = tl.zeros([ROWS, C_TILE // CODES], tl.float32)
            o_odd = o


def attention_decode(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    relative: RelativeTerm | None = None,
    slopes_H: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return [T, H, C], T = R * q_len. A context includes the queries' own positions, already written; a row
    without a position gives zeros. `config` is for measuring other configurations than the best."""
    config = config or config_of(q_THC.shape[2], q_THC.dtype)
    (num_kv_heads, _, block_size, _) = kv.k.shape
    (num_rows, num_heads, head_dim) = q_THC.shape
    num_requests = num_rows // q_len
    group = num_heads // num_kv_heads
    assert num_rows == num_requests * q_len <= MAX_Q_LEN * num_requests
    assert q_THC.is_contiguous()
    assert kv.k[0].is_contiguous()
    assert kv.k.stride() == kv.v.stride()
    assert block_table_RB.stride(1) == 1
    max_chunks = triton.cdiv(block_table_RB.shape[1] * block_size, config.chunk)
    k, v = (each.view(torch.int16) if each.dtype in (FP8, torch.int8) else each for each in (kv.k, kv.v))
    terms_THE = None if relative is None else terms_by_distance(relative)
    pairs = num_requests * num_kv_heads
    parts = pairs * max_chunks * q_len * group
    o = torch.empty(parts, head_dim, dtype=torch.float32, device=q_THC.device)
    ml = torch.empty(parts, 2, dtype=torch.float32, device=q_THC.device)
    # Of codes, 32 rows at once took twice as long as two tiles of 16 (H200, triton 3.6). Sums of a tile of 32
    # in float32, which no tensor core adds, have another order than those of 16.
    small = kv.k_scale is not None or q_THC.dtype == torch.float32
    rows = 16 if small or q_len * group <= 16 else 32
    shared = {
        "K": num_kv_heads,
        "G": group,
        "C": head_dim,
        "C_TILE": triton.next_power_of_2(head_dim),
        "CHUNK": config.chunk,
    }
    shared |= {"WINDOW": window or 0, **pdl_options(q_THC.device)}
    _attend_chunks[
        (triton.cdiv(q_len * group, rows), pairs, min(max_chunks, triton.cdiv(config.programs, pairs)))
    ](
        q_THC,
        k,
        v,
        kv.k_scale,
        kv.v_scale,
        block_table_RB,
        context_lens_R,
        terms_THE,
        None if relative is None else relative.growth_T,
        slopes_H,
        o,
        ml,
        block_table_RB.stride(0),
        k.stride(0),
        kv.k_scale.stride(0) if kv.k_scale is not None and kv.k_scale.dim() else 0,
        max_chunks,
        q_len,
        scale,
        0.0 if softcap is None else softcap * math.log2(math.e),
        ROWS=rows,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        FORMAT=CODED_FORMATS.get(kv.format, 0),
        CAPPED=softcap is not None,
        EXTENT=0 if terms_THE is None else terms_THE.shape[2],
        INTERPRETED=interpreted(),
        STAGES=config.stages,
        num_warps=config.num_warps,
        PRECISION="ieee" if q_THC.dtype == torch.float32 else "tf32",
        **shared,
    )
    out_THC = torch.empty_like(q_THC)
    merge_chunks[(num_rows, num_heads)](
        o,
        ml,
        context_lens_R,
        out_THC,
        sinks_H,
        max_chunks,
        q_len,
        MERGE=config.merge_chunks,
        SINKS=sinks_H is not None,
        num_warps=config.merge_warps,
        **shared,
    )
    return out_THC


def supports(problem: Problem) -> str | None:
    if (problem.relative or problem.alibi) and problem.softcap:
        return "scores with terms of the distance of keys have no cap"
    return triton_refusal(problem)


register(
    Kernel(
        "attention_decode",
        "triton.paged",
        min_sm=80,
        priority=10,
        supports=supports,
        fn=attention_decode,
    )
)
