"""Units of work of grouped kernels: one expert and at most `BN` of its pairs. A pair is one choice of one
token, numbered t K + k.

Up to a few rows every pair is a unit of its own, and nothing is prepared. More pairs are sorted by expert
once, in their order within an expert, by one launch of a program for each expert: it counts the pairs of all
experts before its own, and writes a table of its units. Both need no host and no atomics, and a grid for the
worst case: units past the end have no expert, -1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait

CHUNK = 2048


@dataclass(frozen=True)
class Units:
    """The expert of each unit [U], -1 if it has none, and its pairs [U, BN], -1 where it has fewer."""

    experts: Tensor
    pairs: Tensor


@jit(varying=("num_pairs", "num_units"))
def _sort_pairs(
    ids_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_units: tl.tensor,
    E2: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    columns = tl.arange(0, CHUNK)
    bins = tl.arange(0, E2)
    counts = tl.zeros([E2], dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        there = first + columns < num_pairs
        ids = tl.load(ids_ptr + first + columns, mask=there, other=0)
        counts += tl.histogram(ids, E2, mask=there)
    tiles = (counts + BN - 1) // BN
    unit = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    slot = unit * BN
    for first in range(0, num_pairs, CHUNK):
        there = first + columns < num_pairs
        own = (tl.load(ids_ptr + first + columns, mask=there, other=-1)) == expert
        rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(pairs_ptr + slot + rank, first + columns, mask=own)
        slot += tl.sum(own.to(tl.int32), axis=0)
    past = count + tl.arange(0, BN)
    tl.store(pairs_ptr + unit * BN + past, -1, mask=past < own_tiles * BN)
    for tile in range(0, own_tiles):
        tl.store(experts_ptr + unit + tile, expert)
    if expert == tl.num_programs(0) - 1:
        for idle in range(unit + own_tiles, num_units, E2):
            tl.store(experts_ptr + idle + bins, -1, mask=idle + bins < num_units)


def sort_pairs(ids_TK: Tensor, num_experts: int, size: int) -> Units:
    """Return units of at most `size` pairs."""
    num_pairs = ids_TK.numel()
    num_units = min(num_pairs, num_pairs // size + min(num_pairs, num_experts))
    experts = torch.empty(num_units, dtype=torch.int32, device=ids_TK.device)
    pairs = torch.empty(num_units, size, dtype=torch.int32, device=ids_TK.device)
    _sort_pairs[(num_experts,)](
        ids_TK,
        experts,
        pairs,
        num_pairs,
        num_units,
        E2=1 << max(num_experts - 1, 1).bit_length(),
        BN=size,
        CHUNK=min(CHUNK, 1 << max(num_pairs - 1, 15).bit_length()),
        num_warps=4,
        **pdl_options(ids_TK.device),
    )
    return Units(experts, pairs)


@jit()
def load_unit(experts_ptr: tl.tensor, pairs_ptr: tl.tensor, BN: tl.constexpr) -> tl.tensor:
    """Return (expert of this program's unit or -1, pairs [BN], which of them are valid)."""
    unit = tl.program_id(1)
    pairs = tl.load(pairs_ptr + unit * BN + tl.arange(0, BN))
    return tl.load(experts_ptr + unit), tl.maximum(pairs, 0), pairs >= 0
