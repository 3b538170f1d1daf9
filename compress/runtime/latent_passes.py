"""The parts of a pass over long prompts whose keys and values are computed from cached latents at once.

Shapes: R sequences, B blocks of the longest one, N blocks of all contexts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from compress.kernels.operands.tiles import FixedLists, dense_blocks


@dataclass(frozen=True)
class LatentPass:
    """Sequences whose keys and values are computed at once: their rows and lengths, the blocks of all their
    contexts, and the table over those (`dense_blocks`)."""

    rows: slice
    block_table_RB: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    blocks_N3: Tensor
    table_RB: Tensor
    lists: FixedLists | None = None


def latent_passes(
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    max_positions: int,
    block_size: int,
    least_chosen: int | None,
) -> Iterator[LatentPass]:
    """Yield neighbouring sequences whose contexts have `max_positions` positions at most, or one sequence;
    those with more than `least_chosen` positions apart from others."""
    few = [least_chosen is None or length <= least_chosen for length in context_lens]
    ends = list(accumulate(query_lens, initial=0))
    start = 0
    while start < len(query_lens):
        stop = start + 1
        total = -(-context_lens[start] // block_size) * block_size
        while stop < len(query_lens):
            total += -(-context_lens[stop] // block_size) * block_size
            if total > max_positions or few[stop] != few[start]:
                break
            stop += 1
        own = slice(start, stop)
        lens = query_lens[own], context_lens[own]
        places = dense_blocks(context_lens[own], block_size, block_table_RB.device)
        yield LatentPass(slice(ends[start], ends[stop]), block_table_RB[own], *lens, *places)
        start = stop
