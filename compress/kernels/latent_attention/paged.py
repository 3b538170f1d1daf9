"""Triton decode attention over cached latents: keys in fixed absolute chunks, chunks in any program, one
order of summation.

    s = (q_R k_R^T + q_P k_P^T) scale log2(e),  m_j = max s,  l_j = sum 2^(s - m_j),  o_j = 2^(s - m_j) k_R
    m = max_j m_j,                 out = sum_j 2^(m_j - m) o_j / sum_j 2^(m_j - m) l_j

A key has R numbers of a latent, which are its value too, and P that rotate. A tile of latents is loaded once
for both products, and all heads and all `q_len` queries of a request are rows of them.

Two launches, as in `attention_decode/paged.py`. The first writes o_j of every chunk, in float32: for twenty
heads that is as much as 35 keys. So chunks are short where a sequence begins, which few programs would read
one after the other, and longer the more there are before them (`_chunk_of`). They lie where they lie for
every sequence, whatever the number of programs, of queries and of requests, and a key that a row does not see
adds exactly zero: the bits of a row depend on its request alone.

Shapes: T rows = R q_len, R requests, B blocks of a table, J chunks, H heads, C head dimension.
"""

from dataclasses import dataclass
from typing import Any

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
from compress.kernels.operands.block_table import block_of
from compress.kernels.operands.e4m3 import converts_e4m3, e4m3_values
from compress.kernels.operands.paged import CODED_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, register

MAX_Q_LEN = 8


@dataclass(frozen=True)
class Config:
    """The constants of the kernel: the bits depend on `chunk` (N), `tile`, `merge_chunks`, the rows and the
    warps, only the time on `stages` and `programs`."""

    chunk: int = 64
    tile: int = 64
    merge_chunks: int = 16
    merge_warps: int = 4
    num_warps: int = 4
    stages: int = 2
    programs: int = 528


def config_of(pages: PagedLatents, dtype: torch.dtype) -> Config:
    """Return the configuration for pages and the dtype of queries. Tiles in flight fit the shared memory of
    sm_80 (163 KiB), and codes are converted in registers."""
    if pages.rows.shape[3] * dtype.itemsize > 2 * 576:
        return Config(tile=16)
    return Config() if pages.scale is None else Config(tile=32)


def rows_of(num_heads: int) -> int:
    """Return the rows of a tile, heads and queries; by the heads alone, so that the bits are those of any
    `q_len`."""
    return 16 if num_heads <= 16 else 32


@jit()
def _chunk_of(position: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return the chunk of a position: of N positions up to 16 N, of 2 N up to 128 N, then of 4 N."""
    beyond = tl.where(
        position < 128 * N, 16 + (position - 16 * N) // (2 * N), 72 + (position - 128 * N) // (4 * N)
    )
    return tl.where(position < 16 * N, position // N, beyond)


@jit()
def _start_of(chunk: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return the first position of a chunk."""
    beyond = tl.where(chunk < 72, (16 + (chunk - 16) * 2) * N, (128 + (chunk - 72) * 4) * N)
    return tl.where(chunk < 16, chunk * N, beyond)


def num_chunks(positions: int, n: int) -> int:
    """Return the chunks of so many positions."""
    spans = ((0, 16 * n, n), (16 * n, 128 * n, 2 * n), (128 * n, positions, 4 * n))
    return sum(-(-max(min(positions, stop) - start, 0) // size) for start, stop, size in spans)


@jit()
def page_values(
    codes: tl.tensor, DTYPE: tl.constexpr, FORMAT: tl.constexpr, CONVERTS: tl.constexpr
) -> tl.tensor:
    """Return what pages hold in DTYPE, codes without their scales."""
    if FORMAT == 0:
        return codes
    elif FORMAT == 3:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    elif CONVERTS:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        return e4m3_values(codes).to(DTYPE)


@jit(varying=("q_len",), unaligned=("table_ptr", "lens_ptr"))
def _attend_latents(
    q_ptr: tl.tensor,
    rotated_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    o_ptr: tl.tensor,
    ml_ptr: tl.tensor,
    table_stride: tl.tensor,
    max_positions: tl.tensor,
    max_chunks: tl.tensor,
    q_len: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    R_TILE: tl.constexpr,
    P_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """o [requests, J, q_len H, R] and (m, l) [requests, J, q_len H, 2] of the chunks of this program."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.program_id(1)
    columns = tl.arange(0, R_TILE)
    turned = tl.arange(0, P_TILE)
    real_row = rows < q_len * H
    real_column = columns < R
    real_turned = turned < P
    row_mask = real_row[:, None] & real_column[None, :]
    offsets = tl.arange(0, TILE)
    table_ptr += request.to(tl.int64) * table_stride
    wait(PDL)
    # Within the table: loaded beside the length, not after it.
    first = _start_of(tl.program_id(2), N)
    block = block_of(table_ptr, first, max_positions, max_positions, BLOCK_SIZE, TILE)
    context_len = tl.load(lens_ptr + request).to(tl.int32)
    num_chunks = _chunk_of(context_len - 1, N) + 1
    positions = context_len - q_len + rows // H
    token = request.to(tl.int64) * q_len + rows // H
    head = token * H + rows % H
    q = tl.load(q_ptr + head[:, None] * R + columns[None, :], mask=row_mask, other=0.0)
    q_turned = tl.load(
        rotated_ptr + head[:, None] * C + C - P + turned[None, :],
        mask=real_row[:, None] & real_turned[None, :],
        other=0.0,
    )
    logit_scale = scale * 1.4426950408889634
    part = request.to(tl.int64) * max_chunks * (q_len * H)
    for chunk in tl.range(tl.program_id(2), num_chunks, tl.num_programs(2)):
        first = _start_of(chunk, N)
        end = tl.minimum(_start_of(chunk + 1, N), context_len)
        if WINDOW > 0:  # no query sees a chunk that ends before the window of the first
            end = tl.where(end <= context_len - q_len + 1 - WINDOW, first, end)
        following = _start_of(chunk + tl.num_programs(2), N)
        following_block = block_of(table_ptr, following, context_len, context_len, BLOCK_SIZE, TILE)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, R_TILE], tl.float32)
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            keys = start + offsets
            real_key = keys < context_len
            slot = block.to(tl.int64) * BLOCK_SIZE + (
                start % BLOCK_SIZE + offsets if BLOCK_SIZE % TILE == 0 else keys % BLOCK_SIZE
            )
            # The id of the next block is loaded one step early: keys then wait for one load and not for two.
            block = block_of(table_ptr, start + TILE, end, context_len, BLOCK_SIZE, TILE)
            page_at = pages_ptr + (slot * (R + P))[:, None]
            latent_codes = tl.load(
                page_at + columns[None, :], mask=real_key[:, None] & real_column[None, :], other=0
            )
            turned_codes = tl.load(
                page_at + R + turned[None, :], mask=real_key[:, None] & real_turned[None, :], other=0
            )
            latent = page_values(latent_codes, q.dtype, FORMAT, CONVERTS)
            key = page_values(turned_codes, q.dtype, FORMAT, CONVERTS)
            s = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
            s = tl.dot(q_turned, tl.trans(key), s, input_precision=PRECISION) * logit_scale
            if FORMAT != 0:
                key_scale = tl.load(scale_ptr + slot, mask=real_key, other=0.0)[None, :]
                s *= key_scale
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
            m_next = tl.maximum(m, tl.max(s, axis=1))
            m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
            p = tl.exp2(s - m_finite[:, None])
            alpha = tl.exp2(m - m_finite)
            total = total * alpha + tl.sum(p, axis=1)
            if FORMAT != 0:
                p *= key_scale
            o = tl.dot(p.to(q.dtype), latent, o * alpha[:, None], input_precision=PRECISION)
            m = m_next
        block = following_block
        row = part + chunk * (q_len * H) + rows
        tl.store(o_ptr + row[:, None] * R + columns[None, :], o, mask=row_mask)
        tl.store(ml_ptr + row * 2, m, mask=real_row)
        tl.store(ml_ptr + row * 2 + 1, total, mask=real_row)


@jit(varying=("q_len",), unaligned=("lens_ptr",))
def _merge_chunks(
    o_ptr: tl.tensor,
    ml_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    max_chunks: tl.tensor,
    q_len: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    R_TILE: tl.constexpr,
    N: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add up the chunks of one row of one head, `MERGE` at a time by a fixed tree. A sink is a key with the
    weight of its score and no value."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query = (token % q_len).to(tl.int32)
    columns = tl.arange(0, R_TILE)
    real_column = columns < R
    part = token // q_len * max_chunks * (q_len * H) + query * H + head
    wait(PDL)
    position = tl.load(lens_ptr + token // q_len).to(tl.int32) - q_len + query
    m = float("-inf")
    total = 0.0
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head) * 1.4426950408889634
        total = 1.0
    o = tl.zeros([R_TILE], tl.float32)
    for start in range(0, _chunk_of(position, N) + 1, MERGE):
        chunks = start + tl.arange(0, MERGE)
        real = chunks <= _chunk_of(position, N)
        at = part + chunks.to(tl.int64) * (q_len * H)
        o_j = tl.load(
            o_ptr + at[:, None] * R + columns[None, :], mask=real[:, None] & real_column[None, :], other=0.0
        )
        m_j = tl.load(ml_ptr + at * 2, mask=real, other=float("-inf"))
        total_j = tl.load(ml_ptr + at * 2 + 1, mask=real, other=0.0)
        m_next = tl.maximum(m, tl.max(m_j, axis=0))
        m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        weight = tl.exp2(m_j - m_finite)
        alpha = tl.exp2(m - m_finite)
        o = o * alpha + tl.sum(o_j * weight[:, None], axis=0)
        total = total * alpha + tl.sum(total_j * weight, axis=0)
        m = m_next
    o = tl.where(total > 0, o / total, 0.0)
    tl.store(out_ptr + (token * H + head) * R + columns, o.to(out_ptr.dtype.element_ty), mask=real_column)


def latent_attention(
    q_THR: Tensor,
    q_THC: Tensor,
    pages: PagedLatents,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, R] of absorbed queries and rotated ones, as the reference; T = R q_len."""
    config = config_of(pages, q_THR.dtype)
    facts: dict[str, Any] = {"q_len": q_len, "scale": scale, "window": window, "sinks_H": sinks_H}
    return attend(q_THR, q_THC, pages, block_table_RB, context_lens_R, config=config, **facts)


def attend(
    q_THR: Tensor,
    q_THC: Tensor,
    pages: PagedLatents,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    config: Config,
) -> Tensor:
    """Compute `latent_attention` in a given configuration."""
    (num_rows, num_heads, rank) = q_THR.shape
    (_, _, block_size, width) = pages.rows.shape
    num_requests = num_rows // q_len
    assert num_rows == num_requests * q_len <= MAX_Q_LEN * num_requests
    assert q_THR.is_contiguous()
    assert q_THC.is_contiguous()
    assert pages.rows.is_contiguous()
    assert block_table_RB.stride(1) == 1
    positions = block_table_RB.shape[1] * block_size
    max_chunks = num_chunks(positions, config.chunk)
    parts = num_requests * max_chunks * q_len * num_heads
    o = torch.empty(parts, rank, dtype=torch.float32, device=q_THR.device)
    ml = torch.empty(parts, 2, dtype=torch.float32, device=q_THR.device)
    rows = rows_of(num_heads)
    row_tiles = triton.cdiv(q_len * num_heads, rows)
    shared = {
        **{"H": num_heads, "R": rank, "R_TILE": max(32, triton.next_power_of_2(rank)), "N": config.chunk},
        **pdl_options(q_THR.device),
    }
    _attend_latents[
        (row_tiles, num_requests, min(max_chunks, triton.cdiv(config.programs, num_requests * row_tiles)))
    ](
        q_THR,
        q_THC,
        pages.rows if pages.scale is None else pages.rows.view(torch.uint8),
        pages.scale,
        block_table_RB,
        context_lens_R,
        o,
        ml,
        block_table_RB.stride(0),
        positions,
        max_chunks,
        q_len,
        scale,
        C=q_THC.shape[2],
        P=width - rank,
        P_TILE=max(32, triton.next_power_of_2(width - rank)),
        ROWS=rows,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        FORMAT=CODED_FORMATS.get(pages.format, 0),
        CONVERTS=converts_e4m3(q_THR.device),
        STAGES=config.stages,
        PRECISION="ieee" if q_THR.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        **shared,
    )
    out_THR = torch.empty_like(q_THR)
    _merge_chunks[(num_rows, num_heads)](
        o,
        ml,
        context_lens_R,
        sinks_H,
        out_THR,
        max_chunks,
        q_len,
        MERGE=config.merge_chunks,
        num_warps=config.merge_warps,
        **shared,
    )
    return out_THR


register(
    Kernel(
        "latent_attention",
        "triton.paged",
        min_sm=80,
        priority=10,
        supports=triton_refusal,
        fn=latent_attention,
    )
)
