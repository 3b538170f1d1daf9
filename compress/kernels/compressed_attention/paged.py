"""Triton: compressed attention over the paged cache in a few launches (`reference.py` has the definition).

Entries that are over are computed anew (`entry_sums.py`), and with an indexer those that are scored, too.
What a row attends to is gathered: its entries one after the other, all or the chosen ones, and after them the
positions of its window. Neither step has more programs for a longer table. Latents that all heads read are
attended to by `latent_attention`, whose chunks lie where they lie for any row. So a row's bits depend on its
sequence up to its position alone.

Shapes: T rows, R sequences, B blocks of the longest, H heads, C head dimension, E entries of the longest, K
keys that are gathered for a row, L positions of a table.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    wait,
)
from compress.kernels.compressed_attention.entry_sums import BLOCK, entries_of
from compress.kernels.index_choice.largest import largest
from compress.kernels.index_choice.paged import index_scores
from compress.kernels.latent_attention.paged import latent_attention, page_values
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.e4m3 import converts_e4m3
from compress.kernels.operands.index_keys import MOST_SCORES, operand_refusal, programs_of_row
from compress.kernels.operands.paged import CODED_FORMATS
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.turned_rows import odd_refusal, tile_of, turn_rows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

MOST_SUMMED = 1 << 27
"""Numbers that are gathered, and summed, for rows at once, about: 256 MiB of keys in 16 bits."""


@jit(unaligned=("table_ptr", "sequence_ptr", "positions_ptr", "chosen_ptr", "counts_ptr"))
def _gather(
    entries_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequence_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_entries: tl.tensor,
    num_keys: tl.tensor,
    width: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    RATE: tl.constexpr,
    MOST_CHOSEN: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Copy some of the keys of a row: entries, and then positions of the window. Programs of a row take parts
    of them in turn."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C_TILE)
    real = (column < C)[None, :]
    DTYPE: tl.constexpr = keys_ptr.dtype.element_ty
    wait(PDL)
    last = tl.load(positions_ptr + row).to(tl.int32)
    sequence = tl.load(sequence_ptr + row).to(tl.int64)
    far = 0
    if RATE > 0:
        far = (last + 1) // RATE
        if MOST_CHOSEN > 0:
            far = tl.minimum(far, MOST_CHOSEN)
    near = tl.minimum(last + 1, WINDOW)
    if tl.program_id(1) == 0:
        tl.store(counts_ptr + row, far + near)
    for start in range(tl.program_id(1) * AT_ONCE, far + near, tl.num_programs(1) * AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        position = last + 1 - near + place - far
        is_near = (place >= far) & (place < far + near)
        block = tl.load(table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=is_near, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        page_at = pages_ptr + (slot * width)[:, None] + column[None, :]
        codes = tl.load(page_at, mask=is_near[:, None] & real, other=0)
        keys = page_values(codes, DTYPE, FORMAT, CONVERTS)
        if FORMAT != 0:
            scale = tl.load(scale_ptr + slot, mask=is_near, other=0.0)[:, None]
            keys = (keys.to(tl.float32) * scale).to(DTYPE)
        if RATE > 0:
            is_far = place < far
            entry = place.to(tl.int64)
            if MOST_CHOSEN > 0:
                entry = tl.load(chosen_ptr + row * MOST_CHOSEN + place, mask=is_far, other=0).to(tl.int64)
            at = (sequence * num_entries + entry) * C
            of_entries = tl.load(
                entries_ptr + at[:, None] + column[None, :], mask=is_far[:, None] & real, other=0.0
            )
            keys = tl.where(is_far[:, None], of_entries, keys)
        into = (row * num_keys + place)[:, None] * C + column[None, :]
        tl.store(keys_ptr + into, keys, mask=(place < far + near)[:, None] & real)


def compressed_attention(
    q_THC: Tensor,
    pages: PagedLatents,
    weights: EntryWeights | None,
    cos_LR: Tensor,
    sin_LR: Tensor,
    block_table_RB: Tensor,
    sequence_T: Tensor,
    positions_T: Tensor,
    *,
    window: int,
    scale: float,
    sinks_H: Tensor,
    choice: EntryChoice | None = None,
) -> Tensor:
    """Return [T, H, C] (`reference.py`)."""
    num_rows, num_heads, head_dim = q_THC.shape
    if num_rows == 0:
        return torch.empty_like(q_THC)
    assert pages.rows.is_contiguous()
    block_table_RB = block_table_RB.contiguous()
    tables = cos_LR, sin_LR
    assert cos_LR.stride() == sin_LR.stride()
    entries_REC = scored_REI = None
    num_far = 0
    if weights is not None:
        last_R = positions_T.new_full((len(block_table_RB),), -1)
        last_R = last_R.scatter_reduce(0, sequence_T.to(torch.int64), positions_T, "amax")
        passed = (block_table_RB, last_R, tables, q_THC.dtype)
        entries_REC = entries_of(weights, pages, head_dim, *passed)
        num_far = entries_REC.shape[1]
        if choice is not None and choice.top_entries < num_far:
            num_far = choice.top_entries
            scored_REI = entries_of(choice.weights, pages, head_dim + weights.raw_width, *passed)
    num_keys = -(-(num_far + window) // BLOCK) * BLOCK
    of_row = num_keys * head_dim + 2 * num_keys // BLOCK * num_heads * head_dim
    if scored_REI is not None:
        of_row = max(of_row, MOST_SUMMED * scored_REI.shape[1] // MOST_SCORES)
    at_once = max(1, MOST_SUMMED // of_row)
    parts = []
    for start in range(0, num_rows, at_once):
        rows = slice(start, start + at_once)
        own = sequence_T[rows], positions_T[rows]
        chosen_TK = None
        if scored_REI is not None:
            assert choice is not None
            assert weights is not None
            chosen_TK = _chosen(choice, scored_REI, rows, *own, weights.facts.rate, tables)
        keys = _gathered(
            pages, entries_REC, chosen_TK, weights, block_table_RB, *own, window, num_keys, q_THC
        )
        parts.append(_attended(q_THC[rows], *keys, scale=scale, sinks_H=sinks_H))
    attended_THC = parts[0] if len(parts) == 1 else torch.cat(parts)
    return turn_rows(attended_THC, *tables, positions_T, back=True)


def _chosen(
    choice: EntryChoice,
    scored_REI: Tensor,
    rows: slice,
    sequence_T: Tensor,
    positions_T: Tensor,
    rate: int,
    tables: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the entries [T, K] that rows choose, in rising order."""
    num_sequences, num_entries, index_dim = scored_REI.shape
    q_TNI = turn_rows(choice.q_TNI[rows], *tables, positions_T)
    blocks_RB = torch.arange(
        num_sequences * num_entries // BLOCK, dtype=torch.int32, device=scored_REI.device
    )
    blocks_TB = blocks_RB.view(num_sequences, -1)[sequence_T]
    ends_T = (positions_T + 1) // rate
    scored = PagedLatents(scored_REI.view(1, -1, BLOCK, index_dim))
    scores_TE = index_scores(q_TNI, choice.factors_TN[rows].to(torch.float32), scored, blocks_TB, ends_T)
    return largest(scores_TE, ends_T, choice.top_entries)


def _gathered(
    pages: PagedLatents,
    entries_REC: Tensor | None,
    chosen_TK: Tensor | None,
    weights: EntryWeights | None,
    block_table_RB: Tensor,
    sequence_T: Tensor,
    positions_T: Tensor,
    window: int,
    num_keys: int,
    q_THC: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the keys [T, K, C] of rows, of which those after the last one are not written, and how many each
    has, int32 [T]."""
    num_rows = len(positions_T)
    head_dim = q_THC.shape[2]
    keys_TKC = torch.empty(num_rows, num_keys, head_dim, dtype=q_THC.dtype, device=q_THC.device)
    counts_T = torch.empty(num_rows, dtype=torch.int32, device=q_THC.device)
    at_once = 32
    _gather[(num_rows, programs_of_row(num_rows, triton.cdiv(num_keys, at_once)))](
        keys_TKC if entries_REC is None else entries_REC,
        chosen_TK,
        pages.rows if pages.scale is None else pages.rows.view(torch.uint8),
        pages.scale,
        block_table_RB,
        sequence_T.contiguous(),
        positions_T.contiguous(),
        keys_TKC,
        counts_T,
        block_table_RB.stride(0),
        0 if entries_REC is None else entries_REC.shape[1],
        num_keys,
        pages.rows.shape[3],
        C=head_dim,
        C_TILE=tile_of(head_dim),
        RATE=0 if weights is None else weights.facts.rate,
        MOST_CHOSEN=0 if chosen_TK is None else chosen_TK.shape[1],
        WINDOW=window,
        AT_ONCE=at_once,
        BLOCK_SIZE=pages.block_size,
        FORMAT=CODED_FORMATS.get(pages.format, 0),
        CONVERTS=converts_e4m3(pages.rows.device),
        num_warps=8 if head_dim > 128 else 4,
        **pdl_options(pages.rows.device),
    )
    return keys_TKC, counts_T


def _attended(q_THC: Tensor, keys_TKC: Tensor, counts_T: Tensor, *, scale: float, sinks_H: Tensor) -> Tensor:
    """Return attention [T, H, C] of rows to the first keys of each, which are the values, too."""
    num_rows, num_keys, head_dim = keys_TKC.shape
    blocks_T = torch.arange(num_rows * num_keys // BLOCK, dtype=torch.int32, device=q_THC.device)
    return latent_attention(
        q_THC.contiguous(),
        q_THC.new_empty(num_rows, q_THC.shape[1], 0),
        PagedLatents(keys_TKC.view(1, -1, BLOCK, head_dim)),
        blocks_T.view(num_rows, -1),
        counts_T,
        q_len=1,
        scale=scale,
        sinks_H=sinks_H,
    )


def _refusal(problem: Problem) -> str | None:
    """Return why pairs of a head cannot turn here, or the indexer is too wide, None where it is served."""
    if refusal := odd_refusal(problem):
        return refusal
    num_heads, width = problem.indexer
    return operand_refusal(num_heads, width, problem.dtype.itemsize) if width else None


register(
    Kernel(
        "compressed_attention",
        "triton.paged",
        min_sm=80,
        priority=10,
        supports=_refusal,
        fn=compressed_attention,
    )
)
