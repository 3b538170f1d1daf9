"""What a decode step reads and advances, on the device: for each row its last token, its context, its blocks and its sampling parameters.

A step serves one row a request. Its kernels take everything from these tensors and the step ends by writing the next one's values,

    tokens <- the tokens just chosen,  context_lens <- context_lens + 1 (running rows only)

so steps follow one another without the host, and a captured graph can be replayed as it is. The host writes only when requests come or go
(`load`), or a sequence grows into a new block (`append_block`).

Rows beyond the requests fill up a batch to a size for which there is a graph: a context of one token that never grows, in the padding
block.

Shapes: R rows, B blocks of the longest sequence, and one more for the step that follows a request's last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.paged import PADDING_BLOCK
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingRows


@dataclass(frozen=True)
class DecodeRow:
    """One request as the host sees it: the token that is fed next, the context that includes it, and where its keys and values are."""

    token: int
    context_len: int
    blocks: Sequence[int]
    params: SamplingParams


class DecodeState:
    """Tensors for at most `max_rows` requests of at most `max_model_len` tokens."""

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._block_size = block_size
        num_columns = -(-max_model_len // block_size) + 1
        self.tokens_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.context_lens_R = torch.ones(max_rows, dtype=torch.int64, device=device)
        self.block_table_RB = torch.full((max_rows, num_columns), PADDING_BLOCK, dtype=torch.int64, device=device)
        self._sampling = self._sampling_of(())
        self._running_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._table = torch.full((max_rows, num_columns), PADDING_BLOCK, dtype=torch.int64, pin_memory=device.type == "cuda")

    def clear(self) -> None:
        """Every row a filler: what a graph is captured and warmed up with."""
        self.load(())

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Rows 0, 1, ... become these requests, the others fillers. The device must have finished all earlier steps."""
        spare = self.max_rows - len(rows)
        self._table.fill_(PADDING_BLOCK)
        for row_idx, row in enumerate(rows):
            self._table[row_idx, : len(row.blocks)] = torch.tensor(row.blocks)
        self.block_table_RB.copy_(self._table)
        self.tokens_R.copy_(torch.tensor([*(row.token for row in rows), *[0] * spare]))
        self.context_lens_R.copy_(torch.tensor([*(row.context_len for row in rows), *[1] * spare]))
        self._running_R.copy_(torch.tensor([*[1] * len(rows), *[0] * spare]))
        self._sampling.copy_(self._sampling_of(rows))

    def append_block(self, row_idx: int, block_idx: int, block: int) -> None:
        """A running row's next block. The host's copy only ever gains entries, so the transfer need not be waited for."""
        self._table[row_idx, block_idx] = block
        self.block_table_RB[row_idx, block_idx].copy_(self._table[row_idx, block_idx], non_blocking=True)

    def positions(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Position and slot, int64 [R], of the token that each row feeds."""
        positions_R = self.context_lens_R[:num_rows] - 1
        column_R = torch.div(positions_R, self._block_size, rounding_mode="floor")
        blocks_R = self.block_table_RB[:num_rows].gather(1, column_R.unsqueeze(1)).squeeze(1)
        return positions_R, blocks_R * self._block_size + positions_R % self._block_size

    def sampling(self, num_rows: int) -> SamplingRows:
        return self._sampling.first(num_rows)

    def advance_(self, tokens_R: Tensor) -> None:
        num_rows = tokens_R.shape[0]
        self.tokens_R[:num_rows].copy_(tokens_R)
        self.context_lens_R[:num_rows].add_(self._running_R[:num_rows])

    def _sampling_of(self, rows: Sequence[DecodeRow]) -> SamplingRows:
        return SamplingRows.of([row.params for row in rows], self.tokens_R.device, pad_to=self.max_rows)
