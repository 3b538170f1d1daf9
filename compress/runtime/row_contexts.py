"""The contexts of the rows of a pass each on its own, and pages of the positions that an indexer chooses for
a row (`models/indexer.py`): in rising order in blocks of the row's own, which attention reads like those of a
sequence of so many positions.

Shapes: T rows, R sequences, B blocks of the longest sequence, K positions chosen, N choices of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.paged_latents import PagedLatents, Pages
from compress.kernels.step.host_memory import sent
from compress.runtime.kv_cache import MOST_CHOSEN_BYTES


@dataclass(frozen=True)
class RowContexts:
    """The blocks of the sequence of each row [T, B], and how many positions the row sees, its own
    included."""

    table_TB: Tensor
    ends_T: Tensor

    @staticmethod
    def decoded(block_table_RB: Tensor, context_lens_R: Tensor, q_len: int) -> "RowContexts":
        """Return those of the last `q_len` rows of each sequence; `context_lens` count them."""
        before_Q = torch.arange(q_len - 1, -1, -1, device=context_lens_R.device)
        ends_RQ = context_lens_R.unsqueeze(1) - before_Q
        return RowContexts(block_table_RB.repeat_interleave(q_len, dim=0), ends_RQ.flatten())

    @staticmethod
    def prefilled(
        block_table_RB: Tensor, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> "RowContexts":
        """Return those of `query_lens[r]` rows of each sequence, which end its context."""
        rows = [
            (sequence, end + 1)
            for sequence, (size, length) in enumerate(zip(query_lens, context_lens, strict=True))
            for end in range(length - size, length)
        ]
        sequence_T, ends_T = sent(torch.tensor(rows), block_table_RB.device).unbind(1)
        return RowContexts(block_table_RB[sequence_T], ends_T)

    def __len__(self) -> int:
        return len(self.ends_T)

    def part(self, rows: slice) -> "RowContexts":
        """Return those of some rows."""
        return RowContexts(self.table_TB[rows], self.ends_T[rows])

    def chosen(
        self, pages: PagedLatents, slots_TK: Tensor, lens_T: Tensor
    ) -> tuple[PagedLatents, "RowContexts"]:
        """Return pages of the chosen slots of each row alone, and where the rows find these in them, the
        first `lens_T`."""
        slots_TK = _whole_blocks(slots_TK, pages.block_size)
        num_blocks = slots_TK.shape[1] // pages.block_size
        return pages.gathered(slots_TK), self._one_after_another(num_blocks, lens_T)

    def of_heads(self, pages: PagedKV, slots_TNK: Tensor, lens_T: Tensor) -> tuple[PagedKV, "RowContexts"]:
        """Return pages of the slots that are chosen for each KV head, or for all, and where the rows find
        these in them, the first `lens_T`."""
        slots_TNK = _whole_blocks(slots_TNK, pages.block_size)
        num_blocks = slots_TNK.shape[2] // pages.block_size
        return pages.gathered(slots_TNK), self._one_after_another(num_blocks, lens_T)

    def _one_after_another(self, num_blocks: int, ends_T: Tensor) -> "RowContexts":
        """Return as many blocks for each row, in the order of rows."""
        like = self.table_TB
        blocks = torch.arange(len(ends_T) * num_blocks, device=like.device, dtype=like.dtype)
        return RowContexts(blocks.view(len(ends_T), -1), ends_T)


def _whole_blocks(slots: Tensor, block_size: int) -> Tensor:
    """Return slots [..., K], and any after them up to whole blocks."""
    missing = -slots.shape[-1] % block_size
    return F.pad(slots, (0, missing)) if missing else slots


@dataclass(frozen=True)
class RowPart:
    """Neighbouring sequences of a pass over prompts: their rows, and their blocks, query lengths and context
    lengths. Where rows may attend to some of their positions only they have contexts each on its own."""

    rows: slice
    whole: tuple[Tensor, tuple[int, ...], tuple[int, ...]]
    choosing: RowContexts | None


def row_parts(
    block_table_RB: Tensor, query_lens: tuple[int, ...], context_lens: tuple[int, ...], least: int | None
) -> list[RowPart]:
    """Return the sequences of a pass in parts of those that have more positions than `least`, and of those
    that have not."""
    parts = []
    first = 0
    sequences = range(len(query_lens))
    for chooses, group in groupby(sequences, key=lambda idx: least is not None and context_lens[idx] > least):
        own = list(group)
        which = slice(own[0], own[-1] + 1)
        whole = block_table_RB[which], query_lens[which], context_lens[which]
        rows = slice(first, first + sum(whole[1]))
        parts.append(RowPart(rows, whole, RowContexts.prefilled(*whole) if chooses else None))
        first = rows.stop
    return parts


def rows_at_once(pages: Pages, num_positions: int) -> int:
    """Return how many rows attend at once to so many positions each."""
    of_row = sum(each[:, 0, 0].nbytes for each in pages.tensors) * num_positions
    return max(1, MOST_CHOSEN_BYTES // of_row)
