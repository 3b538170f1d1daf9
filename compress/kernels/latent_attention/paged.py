"""Triton decode attention over cached latents: keys in fixed absolute chunks, chunks in any program, one
order of summation, as in `attention_decode/paged.py`, whose second launch adds the chunks up.

    s = (q_R k_R^T + q_P k_P^T) scale log2(e),    o_j = 2^(s - m_j) k_R

A key has R numbers of a latent, which are its value too, and P that rotate. A tile of latents is loaded once
for both products, and all heads and all `q_len` queries of a request are rows of them.

Shapes: T rows = R q_len, R requests, B blocks of a table, H heads, C head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
from compress.kernels.operands.page_codes import even_codes, load_queries, odd_codes, offset_sum
from compress.kernels.operands.paged import CODED_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, register

MAX_Q_LEN = 8


@dataclass(frozen=True)
class Config:
    """The constants of the kernel: the bits depend on `chunk`, `tile`, `merge_chunks`, the rows and the
    warps, only the time on `stages` and `programs`."""

    chunk: int = 128
    tile: int = 32
    merge_chunks: int = 16
    merge_warps: int = 1
    num_warps: int = 8
    stages: int = 3
    programs: int = 264


def config_of(width: int, dtype: torch.dtype) -> Config:
    """Return the configuration for keys of `width` numbers, whose tiles in flight fit the shared memory of
    sm_80 (163 KiB)."""
    return Config() if width * dtype.itemsize <= 2 * 640 else Config(tile=16, stages=2)


def rows_of(num_heads: int) -> int:
    """Return the rows of a tile, heads and queries; by the heads alone, so that the bits are those of any
    `q_len`."""
    return 16 if num_heads <= 16 else 32


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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """o [requests, J, q_len H, R] and (m, l) [requests, J, q_len H, 2] of the chunks J of this program."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.program_id(1)
    # Codes come in pairs, as in `attention_decode/paged.py`.
    CODES: tl.constexpr = 1 if FORMAT == 0 else 2
    WIDTH: tl.constexpr = (R + P) // CODES
    columns = tl.arange(0, R_TILE // CODES)
    turned = tl.arange(0, P_TILE // CODES)
    real_row = rows < q_len * H
    real_column = columns < R // CODES
    real_turned = turned < P // CODES
    row_mask = real_row[:, None] & real_column[None, :]
    offsets = tl.arange(0, TILE)
    table_ptr += request.to(tl.int64) * table_stride
    wait(PDL)
    context_len = tl.load(lens_ptr + request).to(tl.int32)
    first_chunk = tl.program_id(2)
    num_chunks = tl.cdiv(tl.maximum(tl.cdiv(context_len, CHUNK) - first_chunk, 0), tl.num_programs(2))
    if num_chunks == 0:
        return
    block = block_of(
        table_ptr,
        first_chunk * CHUNK,
        first_chunk * CHUNK + TILE,
        first_chunk * CHUNK + TILE,
        BLOCK_SIZE,
        TILE,
    )
    positions = context_len - q_len + rows // H
    token = request.to(tl.int64) * q_len + rows // H
    head = token * H + rows % H
    q_at = q_ptr + head[:, None] * R + columns[None, :] * CODES
    q, q_odd, logit_scale, p_scale, value_scale = load_queries(q_at, row_mask, scale, FORMAT)
    rotated_at = rotated_ptr + head[:, None] * C + C - P + turned[None, :] * CODES
    rotated_mask = real_row[:, None] & real_turned[None, :]
    r, r_odd, _, _, _ = load_queries(rotated_at, rotated_mask, scale, FORMAT)
    part = request.to(tl.int64) * max_chunks * (q_len * H)

    no_keys = 0.0
    if FORMAT > 2:
        no_keys = -offset_sum(q, q.dtype, FORMAT) - offset_sum(q_odd, q.dtype, FORMAT)
        no_keys -= offset_sum(r, q.dtype, FORMAT) + offset_sum(r_odd, q.dtype, FORMAT)
    TILES: tl.constexpr = CHUNK // TILE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, R_TILE // CODES], tl.float32)
    o_odd = o
    for step in tl.range(0, num_chunks * TILES, num_stages=STAGES):
        chunk = first_chunk + step // TILES * tl.num_programs(2)
        start = chunk * CHUNK + step % TILES * TILE
        keys = start + offsets
        real_key = keys < context_len
        slot = block.to(tl.int64) * BLOCK_SIZE + (
            start % BLOCK_SIZE + offsets if BLOCK_SIZE % TILE == 0 else keys % BLOCK_SIZE
        )
        next_start = (first_chunk + (step + 1) // TILES * tl.num_programs(2)) * CHUNK + (
            step + 1
        ) % TILES * TILE
        block = block_of(table_ptr, next_start, context_len, context_len, BLOCK_SIZE, TILE)
        key_at = pages_ptr + (slot * WIDTH)[:, None] + columns[None, :]
        turned_at = pages_ptr + (slot * WIDTH)[:, None] + R // CODES + turned[None, :]
        latent = tl.load(key_at, mask=real_key[:, None] & real_column[None, :], other=0)
        key = tl.load(turned_at, mask=real_key[:, None] & real_turned[None, :], other=0)
        if FORMAT == 0:
            s = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
            s = tl.dot(r, tl.trans(key), s, input_precision=PRECISION)
        else:
            even = even_codes(latent, q.dtype, FORMAT, INTERPRETED)
            odd = odd_codes(latent, q.dtype, FORMAT, INTERPRETED)
            s = tl.dot(q, tl.trans(even), input_precision=PRECISION)
            s = tl.dot(q_odd, tl.trans(odd), s, input_precision=PRECISION)
            key_even = even_codes(key, q.dtype, FORMAT, INTERPRETED)
            key_odd = odd_codes(key, q.dtype, FORMAT, INTERPRETED)
            s = tl.dot(r, tl.trans(key_even), s, input_precision=PRECISION)
            s = tl.dot(r_odd, tl.trans(key_odd), s, input_precision=PRECISION)
        if FORMAT > 2:
            s += no_keys
        s *= logit_scale
        if FORMAT != 0:
            key_scale = tl.load(scale_ptr + slot, mask=real_key, other=0.0)[None, :]
            s *= key_scale
        s = tl.where(keys[None, :] <= positions[:, None], s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, axis=1))
        m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
        total = total * alpha + tl.sum(p, axis=1)
        if FORMAT == 0:
            o = tl.dot(p.to(q.dtype), latent, o * alpha[:, None], input_precision=PRECISION)
        else:
            weight = (p * p_scale * key_scale).to(q.dtype)
            o *= alpha[:, None]
            o_odd *= alpha[:, None]
            if FORMAT > 2:
                no_values = offset_sum(weight, q.dtype, FORMAT)
                o -= no_values
                o_odd -= no_values
            o = tl.dot(weight, even, o, input_precision=PRECISION)
            o_odd = tl.dot(weight, odd, o_odd, input_precision=PRECISION)
        m = m_next
        if step % TILES == TILES - 1:
            row = part + chunk.to(tl.int64) * (q_len * H) + rows
            o_at = o_ptr + row[:, None] * R + columns[None, :] * CODES
            tl.store(o_at, o * value_scale, mask=row_mask)
            if FORMAT != 0:
                tl.store(o_at + 1, o_odd * value_scale, mask=row_mask)
            tl.store(ml_ptr + row * 2, m, mask=real_row)
            tl.store(ml_ptr + row * 2 + 1, total, mask=real_row)
            m = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            o = tl.zeros([ROWS, R_TILE // CODES], tl.float32)
            o_odd = o


def latent_attention(
    q_THR: Tensor,
    q_THC: Tensor,
    pages: PagedLatents,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    scale: float,
) -> Tensor:
    """Return [T, H, R] of absorbed queries and rotated ones, as the reference; T = R q_len."""
    config = config_of(pages.rows.shape[3], q_THR.dtype)
    return attend(
        q_THR, q_THC, pages, block_table_RB, context_lens_R, q_len=q_len, scale=scale, config=config
    )


def attend(
    q_THR: Tensor,
    q_THC: Tensor,
    pages: PagedLatents,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    scale: float,
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
    max_chunks = triton.cdiv(block_table_RB.shape[1] * block_size, config.chunk)
    parts = num_requests * max_chunks * q_len * num_heads
    o = torch.empty(parts, rank, dtype=torch.float32, device=q_THR.device)
    ml = torch.empty(parts, 2, dtype=torch.float32, device=q_THR.device)
    rows = rows_of(num_heads)
    row_tiles = triton.cdiv(q_len * num_heads, rows)
    programs = min(max_chunks, triton.cdiv(config.programs, num_requests * row_tiles))
    rank_tile = max(32, triton.next_power_of_2(rank))
    pdl = pdl_options(q_THR.device)
    _attend_latents[(row_tiles, num_requests, programs)](
        q_THR,
        q_THC,
        pages.rows if pages.scale is None else pages.rows.view(torch.int16),
        pages.scale,
        block_table_RB,
        context_lens_R,
        o,
        ml,
        block_table_RB.stride(0),
        max_chunks,
        q_len,
        scale,
        H=num_heads,
        C=q_THC.shape[2],
        R=rank,
        P=width - rank,
        R_TILE=rank_tile,
        P_TILE=max(32, triton.next_power_of_2(width - rank)),
        ROWS=rows,
        CHUNK=config.chunk,
        TILE=config.tile,
        BLOCK_SIZE=block_size,
        FORMAT=CODED_FORMATS.get(pages.format, 0),
        INTERPRETED=interpreted(),
        STAGES=config.stages,
        PRECISION="ieee" if q_THR.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        **pdl,
    )
    out_THR = torch.empty_like(q_THR)
    merge_chunks[(num_rows, num_heads)](
        o,
        ml,
        context_lens_R,
        out_THR,
        None,
        max_chunks,
        q_len,
        K=1,
        G=num_heads,
        C=rank,
        C_TILE=rank_tile,
        CHUNK=config.chunk,
        MERGE=config.merge_chunks,
        WINDOW=0,
        SINKS=False,
        num_warps=config.merge_warps,
        **pdl,
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
