"""Units of work of grouped kernels: one expert and at most `BN` of its pairs. A pair is one choice of one
token, numbered t K + k.

Few pairs are scanned by every program: unit u is the expert of pair u if no earlier pair has the same, so
there is nothing to prepare. Many pairs are sorted by expert once, in their order within an expert, by one
launch of a program for each expert that counts the ids before its own. Both need no host and no atomics, and
a grid for the worst case: units past the end have nothing to do.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait

CHUNK = 2048


@jit(varying=("num_pairs",))
def _sort_pairs(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_pairs: tl.tensor,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    columns = tl.arange(0, CHUNK)
    start = tl.full([], 0, dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + first + columns, mask=first + columns < num_pairs, other=1 << 30)
        start += tl.sum((ids < expert).to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, start)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + first + columns, mask=first + columns < num_pairs, other=1 << 30)
        own = ids == expert
        rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + start + rank, first + columns, mask=own)
        start += tl.sum(own.to(tl.int32), axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, start)


def sort_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs [P] sorted by expert, and where each expert's begin [E + 1]."""
    num_pairs = ids_TK.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids_TK.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    chunk = min(CHUNK, 1 << max(num_pairs - 1, 15).bit_length())
    _sort_pairs[(num_experts,)](
        ids_TK, order, starts, num_pairs, CHUNK=chunk, num_warps=4, **pdl_options(ids_TK.device)
    )
    return order, starts


@jit()
def find_unit(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    unit: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.constexpr,
    E2: tl.constexpr,
    BN: tl.constexpr,
    PAIRS: tl.constexpr,
    SORTED: tl.constexpr,
) -> tl.tensor:
    """Return (whether the unit has pairs, its expert, pairs [BN], which of them are valid)."""
    slots = tl.arange(0, BN)
    if SORTED:
        every = tl.arange(0, E2)
        start = tl.load(starts_ptr + every, mask=every < E, other=num_pairs)
        stop = tl.load(starts_ptr + 1 + every, mask=every < E, other=num_pairs)
        tiles = (stop - start + BN - 1) // BN
        ends = tl.cumsum(tiles, axis=0)
        expert = tl.sum((ends <= unit).to(tl.int32), axis=0)
        here = every == expert
        first = tl.sum(tl.where(here, start - (ends - tiles) * BN, 0), axis=0) + unit * BN + slots
        valid = first < tl.sum(tl.where(here, stop, 0), axis=0)
        pairs = tl.load(order_ptr + first, mask=valid, other=0)
        return expert < E, expert, pairs, valid
    else:
        every = tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + every, mask=every < num_pairs, other=-1)
        expert = tl.load(ids_ptr + unit)
        hit = ids == expert
        rank = tl.cumsum(hit.to(tl.int32), axis=0) - 1
        earlier = tl.sum((hit & (every < unit)).to(tl.int32), axis=0)
        chosen = hit[None, :] & (rank[None, :] == slots[:, None])
        pairs = tl.sum(tl.where(chosen, every[None, :], 0), axis=1)
        return earlier == 0, expert, pairs, slots < tl.sum(hit.to(tl.int32), axis=0)
