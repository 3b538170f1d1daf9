"""The lists by which kernels of prompts spread ragged chunks over programs and blocks: tiles of rows, and
blocks of positions of quantized pages.

A CUDA graph reads them from memory that stays in place (`FixedLists`), and launches as many programs for any
chunks: entries beyond the list have no token, or no position.
"""

from functools import lru_cache

import torch
from torch import Tensor

from compress.kernels.step.host_memory import sent


@lru_cache(maxsize=4)
def dense_blocks(
    context_lens: tuple[int, ...], block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return int32 [blocks, 3] of every block of each sequence in order: sequence, place in its table, and
    number of positions; and the table over that order."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    blocks = [
        (sequence, idx, min(block_size, length - idx * block_size))
        for sequence, length in enumerate(context_lens)
        for idx in range(num_blocks[sequence])
    ]
    firsts = [sum(num_blocks[:sequence]) for sequence in range(len(num_blocks))]
    table = [[first + idx for idx in range(max(num_blocks))] for first in firsts]
    lists = (torch.tensor(each, dtype=torch.int32) for each in (blocks, table))
    blocks_N3, table_RB = (sent(each, device) for each in lists)
    return blocks_N3, table_RB


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
    return sent(torch.tensor(tiles, dtype=torch.int32), device)


class FixedLists:
    """The lists of a pass of `num_rows` rows in at most `max_sequences` sequences, whose contexts have at
    most `max_blocks` blocks in all. `load` brings those of other chunks to the same place."""

    def __init__(self, num_rows: int, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._max_sequences = max_sequences
        self.max_blocks = max_blocks
        self._device = device
        self.query_lens: tuple[int, ...] = ()
        self.context_lens: tuple[int, ...] = ()
        self._tiles: dict[int, Tensor] = {}
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor | None = None
        self._sequences: Tensor | None = None

    def load(self, query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> None:
        """Bring the lists of these chunks to where those of the last ones were."""
        self.query_lens = query_lens
        self.context_lens = context_lens
        for size, tiles in self._tiles.items():
            self._load_tiles(size, tiles)
        for block_size, places in self._blocks.items():
            self._load_blocks(block_size, *places)
        if self._rows is not None and self._sequences is not None:
            self._load_sequences(self._rows, self._sequences)

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context lengths and the first rows of the chunks [R], and the chunk of each row [T];
        after the chunks there are some without a row."""
        if self._rows is None or self._sequences is None:
            shape = 2, self._max_sequences
            self._rows = torch.zeros(1, self._num_rows, dtype=torch.int32, device=self._device)
            self._sequences = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._load_sequences(self._rows, self._sequences)
        return self._sequences[0], self._sequences[1], self._rows[0]

    def query_tiles(self, size: int) -> Tensor:
        """Return `query_tiles` of the chunks, and after them tiles without a token."""
        if size not in self._tiles:
            most = -(-self._num_rows // size) + self._max_sequences
            self._tiles[size] = torch.zeros(most, 4, dtype=torch.int32, device=self._device)
            self._load_tiles(size, self._tiles[size])
        return self._tiles[size]

    def dense_blocks(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Return `dense_blocks` of the contexts, and after them blocks without a position."""
        if block_size not in self._blocks:
            shapes = (self.max_blocks, 3), (self._max_sequences, self.max_blocks)
            places = tuple(torch.zeros(each, dtype=torch.int32, device=self._device) for each in shapes)
            self._blocks[block_size] = places[0], places[1]
            self._load_blocks(block_size, *self._blocks[block_size])
        return self._blocks[block_size]

    def _load_tiles(self, size: int, place: Tensor) -> None:
        tiles = query_tiles(self.query_lens, self.context_lens, size, torch.device("cpu"))
        _load(place, tiles)

    def _load_blocks(self, block_size: int, blocks_place: Tensor, table_place: Tensor) -> None:
        blocks, table_RB = dense_blocks(self.context_lens, block_size, torch.device("cpu"))
        _load(blocks_place, blocks)
        _load(table_place, table_RB)

    def _load_sequences(self, rows_place: Tensor, sequences_place: Tensor) -> None:
        lens = torch.tensor(self.query_lens, dtype=torch.int32)
        starts = torch.full((self._max_sequences,), self._num_rows, dtype=torch.int32)
        starts[: len(lens)] = lens.cumsum(0) - lens
        context_lens = torch.zeros_like(starts)
        context_lens[: len(lens)] = torch.tensor(self.context_lens)
        _load(rows_place, torch.arange(len(lens)).repeat_interleave(lens).unsqueeze(0))
        _load(sequences_place, torch.stack((context_lens, starts)))


def _load(place: Tensor, entries: Tensor) -> None:
    """Copy entries [N, C] to the first rows and columns of a place, and zeros to the others. The host does
    not wait for what was launched before."""
    whole = torch.zeros(place.shape, dtype=place.dtype)
    whole[: entries.shape[0], : entries.shape[1]] = entries
    place.copy_(whole.pin_memory() if place.is_cuda else whole, non_blocking=True)
