"""Triton: the entries of the sequences of a pass (`entries.py`), by programs of their own: some sum columns
of its positions, and one norms and turns the sum. An entry's bits depend on its positions alone.

Shapes: R sequences, B blocks of the longest, E entries of the longest, C head dimension.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.latent_attention.paged import page_values
from compress.kernels.operands.compressed import EntryWeights
from compress.kernels.operands.e4m3 import converts_e4m3
from compress.kernels.operands.paged import CODED_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.turned_rows import normed_row, tile_of, turned_pairs

BLOCK = 64
"""Entries of a block of those that are computed."""
TERMS = 4096
"""Numbers that a program sums at once."""


@jit(unaligned=("table_ptr", "last_ptr"))
def _sum_entries(
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    last_ptr: tl.tensor,
    places_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    RATE: tl.constexpr,
    SERIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write some columns of the sum of one entry of one sequence, if it is over."""
    launch_dependents(PDL)
    entry = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < C
    table_ptr += sequence * table_stride
    wait(PDL)
    last = tl.load(last_ptr + sequence).to(tl.int32)
    if (entry + 1) * RATE <= last + 1:
        m = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        x = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, RATE * SERIES, AT_ONCE):
            term = start + tl.arange(0, AT_ONCE)
            position = (entry + 1 - SERIES) * RATE + term
            known = (term < RATE * SERIES) & (position >= 0)
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            of_series = (term // RATE * C)[:, None] + column[None, :]
            shown = known[:, None] & real[None, :]
            page_at = pages_ptr + (slot * width + begin)[:, None] + of_series
            kv_codes = tl.load(page_at, mask=shown, other=0)
            gate_codes = tl.load(page_at + SERIES * C, mask=shown, other=0)
            kv = page_values(kv_codes, tl.float32, FORMAT, CONVERTS).to(tl.float32)
            gate = page_values(gate_codes, tl.float32, FORMAT, CONVERTS).to(tl.float32)
            if FORMAT != 0:
                scale = tl.load(scale_ptr + slot, mask=known, other=0.0)[:, None]
                kv *= scale
                gate *= scale
            place_at = places_ptr + (term % RATE * (SERIES * C))[:, None] + of_series
            gate += tl.load(place_at, mask=shown, other=0.0)
            gate = tl.where(known[:, None], gate, float("-inf"))
            m_next = tl.maximum(m, tl.max(gate, axis=0))
            m_finite = tl.where(m_next == float("-inf"), 0.0, m_next)
            p = tl.exp(gate - m_finite[None, :])
            alpha = tl.exp(m - m_finite)
            total = total * alpha + tl.sum(p, axis=0)
            x = x * alpha + tl.sum(p * kv, axis=0)
            m = m_next
        out_ptr += (sequence * tl.num_programs(0) + entry) * C
        tl.store(out_ptr + column, (x / total).to(out_ptr.dtype.element_ty), mask=real)


@jit(unaligned=("last_ptr",))
def _finish_entries(
    entries_ptr: tl.tensor,
    last_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    angle_stride: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    R: tl.constexpr,
    RATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Norm and turn the sum of one entry in place, if it is over."""
    launch_dependents(PDL)
    entry = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, C_TILE)
    real = column < C
    DTYPE: tl.constexpr = entries_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=real, other=0.0)
    wait(PDL)
    last = tl.load(last_ptr + sequence).to(tl.int32)
    if (entry + 1) * RATE <= last + 1:
        entries_ptr += (sequence * tl.num_programs(0) + entry) * C
        x = tl.load(entries_ptr + column, mask=real, other=0.0).to(tl.float32)
        x = normed_row(x, weight, eps, C, DTYPE).to(tl.float32)
        angle_at = (entry * RATE).to(tl.int64) * angle_stride
        x = turned_pairs(x, cos_ptr, sin_ptr, angle_at, C, C_TILE, R, False)
        tl.store(entries_ptr + column, x.to(DTYPE), mask=real)


def entries_of(
    weights: EntryWeights,
    pages: PagedLatents,
    begin: int,
    block_table_RB: Tensor,
    last_R: Tensor,
    tables: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return the entries [R, E, C] of sequences up to their last positions, of the numbers of a position from
    `begin` on. Those that are not over are not written, and E is a multiple of `BLOCK`."""
    num_sequences = len(block_table_RB)
    facts = weights.facts
    head_dim = len(weights.norm.weight)
    num_entries = -(-block_table_RB.shape[1] * pages.block_size // facts.rate // BLOCK) * BLOCK
    assert weights.norm.bias is None
    assert not weights.norm.centered
    assert weights.positions.is_contiguous()
    out_REC = torch.empty(num_sequences, num_entries, head_dim, dtype=dtype, device=pages.rows.device)
    at_once = min(128, triton.next_power_of_2(facts.rate * facts.num_series))
    columns = min(tile_of(head_dim), TERMS // at_once)
    _sum_entries[(num_entries, num_sequences, triton.cdiv(head_dim, columns))](
        pages.rows if pages.scale is None else pages.rows.view(torch.uint8),
        pages.scale,
        block_table_RB,
        last_R,
        weights.positions,
        out_REC,
        block_table_RB.stride(0),
        pages.rows.shape[3],
        begin,
        C=head_dim,
        COLUMNS=columns,
        RATE=facts.rate,
        SERIES=facts.num_series,
        AT_ONCE=at_once,
        BLOCK_SIZE=pages.block_size,
        FORMAT=CODED_FORMATS.get(pages.format, 0),
        CONVERTS=converts_e4m3(pages.rows.device),
        num_warps=4,
        **pdl_options(pages.rows.device),
    )
    _finish_entries[(num_entries, num_sequences)](
        out_REC,
        last_R,
        weights.norm.weight,
        *tables,
        tables[0].stride(0),
        weights.norm.eps,
        C=head_dim,
        C_TILE=tile_of(head_dim),
        R=tables[0].shape[1],
        RATE=facts.rate,
        num_warps=4,
        **pdl_options(pages.rows.device),
    )
    return out_REC
