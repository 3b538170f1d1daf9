"""Triton: the entries of the sequences of a pass (`entries.py`), each by programs that sum columns of its
positions and one that norms and turns the sum. An entry's bits depend on its positions alone. Programs take
the entries that are over in turn, those of all sequences one after the other, so that their number depends
neither on the table nor on which sequence is long.

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
PROGRAMS = 2112
"""Programs of a launch at most, about: 16 of each multiprocessor of an H200. They take the entries that are
over in turn, so that tables with room for the longest sequence cost no programs."""
LEAST_SEQUENCES = 64
"""Sequences that a program has room for, at least; one kernel serves up to as many."""


@jit()
def _entries_over(
    last_ptr: tl.tensor,
    num_sequences: tl.tensor,
    num_entries: tl.tensor,
    SEQUENCES: tl.constexpr,
    RATE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many entries of each sequence are over [SEQUENCES], and how many of it and of those before
    it."""
    sequence = tl.arange(0, SEQUENCES)
    last = tl.load(last_ptr + sequence, mask=sequence < num_sequences, other=-1).to(tl.int32)
    over = tl.minimum((last + 1) // RATE, num_entries)
    return over, tl.cumsum(over, axis=0)


@jit()
def _sequence_and_entry(
    item: tl.tensor, over: tl.tensor, up_to: tl.tensor, SEQUENCES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sequence, int64, and the entry in it of one of all entries that are over."""
    is_before = up_to <= item
    sequence = tl.sum(is_before.to(tl.int32), axis=0)
    return sequence.to(tl.int64), item - tl.sum(tl.where(is_before, over, 0), axis=0)


@jit(varying=("num_sequences",), unaligned=("table_ptr", "last_ptr"))
def _sum_entries(
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    last_ptr: tl.tensor,
    places_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_sequences: tl.tensor,
    num_entries: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    SEQUENCES: tl.constexpr,
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
    """Write some columns of the sums of some of the entries that are over."""
    launch_dependents(PDL)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < C
    wait(PDL)
    over, up_to = _entries_over(last_ptr, num_sequences, num_entries, SEQUENCES, RATE)
    for item in range(tl.program_id(0), tl.sum(over, axis=0), tl.num_programs(0)):
        sequence, entry = _sequence_and_entry(item, over, up_to, SEQUENCES)
        blocks_ptr = table_ptr + sequence * table_stride
        m = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        x = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, RATE * SERIES, AT_ONCE):
            term = start + tl.arange(0, AT_ONCE)
            position = (entry + 1 - SERIES) * RATE + term
            known = (term < RATE * SERIES) & (position >= 0)
            block = tl.load(blocks_ptr + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
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
        at = (sequence * num_entries + entry) * C
        tl.store(out_ptr + at + column, (x / total).to(out_ptr.dtype.element_ty), mask=real)


@jit(varying=("num_sequences",), unaligned=("last_ptr",))
def _finish_entries(
    entries_ptr: tl.tensor,
    last_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    num_sequences: tl.tensor,
    num_entries: tl.tensor,
    angle_stride: tl.tensor,
    eps: tl.tensor,
    SEQUENCES: tl.constexpr,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    R: tl.constexpr,
    RATE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Norm and turn the sums of some of the entries that are over, in place."""
    launch_dependents(PDL)
    column = tl.arange(0, C_TILE)
    real = column < C
    DTYPE: tl.constexpr = entries_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=real, other=0.0)
    wait(PDL)
    over, up_to = _entries_over(last_ptr, num_sequences, num_entries, SEQUENCES, RATE)
    for item in range(tl.program_id(0), tl.sum(over, axis=0), tl.num_programs(0)):
        sequence, entry = _sequence_and_entry(item, over, up_to, SEQUENCES)
        at = (sequence * num_entries + entry) * C
        x = tl.load(entries_ptr + at + column, mask=real, other=0.0).to(tl.float32)
        x = normed_row(x, weight, eps, C, DTYPE).to(tl.float32)
        angle_at = (entry * RATE).to(tl.int64) * angle_stride
        x = turned_pairs(x, cos_ptr, sin_ptr, angle_at, C, C_TILE, R, False)
        tl.store(entries_ptr + at + column, x.to(DTYPE), mask=real)


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
    tiles = triton.cdiv(head_dim, columns)
    most = num_sequences * num_entries
    of_sequences = max(LEAST_SEQUENCES, triton.next_power_of_2(num_sequences))
    _sum_entries[(min(most, triton.cdiv(PROGRAMS, tiles)), tiles)](
        pages.rows if pages.scale is None else pages.rows.view(torch.uint8),
        pages.scale,
        block_table_RB,
        last_R,
        weights.positions,
        out_REC,
        num_sequences,
        num_entries,
        block_table_RB.stride(0),
        pages.rows.shape[3],
        begin,
        SEQUENCES=of_sequences,
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
    _finish_entries[(min(most, PROGRAMS),)](
        out_REC,
        last_R,
        weights.norm.weight,
        *tables,
        num_sequences,
        num_entries,
        tables[0].stride(0),
        weights.norm.eps,
        SEQUENCES=of_sequences,
        C=head_dim,
        C_TILE=tile_of(head_dim),
        R=tables[0].shape[1],
        RATE=facts.rate,
        num_warps=4,
        **pdl_options(pages.rows.device),
    )
    return out_REC
