"""The lists by which the paged Triton prefill attention spreads ragged chunks over programs: tiles of
queries, and the blocks of quantized pages."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def dense_blocks(num_blocks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int32 [blocks, 2], sequence and place in its table of every block of each sequence in order,
    and the table over that order."""
    blocks = [(sequence, idx) for sequence, count in enumerate(num_blocks) for idx in range(count)]
    firsts = [sum(num_blocks[:sequence]) for sequence in range(len(num_blocks))]
    table = [[first + idx for idx in range(max(num_blocks))] for first in firsts]
    return torch.tensor(blocks, dtype=torch.int32).to(device), torch.tensor(table, dtype=torch.int32).to(
        device
    )


@lru_cache(maxsize=4)
def query_tiles(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], size: int, device: torch.device
) -> Tensor:
    """Return int32 [tiles, 4]: first row among the T, number of tokens, position of the first, sequence. All
    layers of a step share it."""
    tiles = []
    row = 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for start in range(0, query_len, size):
            tiles.append(
                (row + start, min(size, query_len - start), context_len - query_len + start, sequence)
            )
        row += query_len
    tiles.sort(key=lambda tile: tile[1] + tile[2], reverse=True)
    return torch.tensor(tiles, dtype=torch.int32).to(device)
