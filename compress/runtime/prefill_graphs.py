"""Prefill by CUDA graphs: a pass of many small launches costs the host one.

A pass is filled up to one of a few numbers of rows by a sequence of its own in the padding block, so chunks
of many lengths share a graph. Results are those of the filled pass from the first time on: a size is computed
launch by launch when it comes for the first time, and captured then. Graphs share the memory of the largest,
which stays in use; passes of more rows keep the device busy anyway and have none.

Shapes: T rows, D hidden, R sequences, B blocks of the longest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.operands.tiles import FixedLists
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.graphs import Graphs

MAX_ROWS = 4096
"""Most rows of a pass that has a graph."""
MAX_SEQUENCES = 129
"""Most chunks of such a pass, with that which fills it up."""
LEAST_STEP = 16
"""Rows between two sizes of short passes; those of long ones are a thirty-second to a sixteenth apart."""

Hidden = Callable[[PrefillBatch, bool, Features | None, FixedLists | None], Tensor]
"""The layers of a model: (batch, whether its prompts are short, features to fill in, the lists of its chunks
where a graph reads them) -> the stream [T, D] after the last layer."""


@dataclass(frozen=True)
class _Key:
    """A graph is captured for one of these."""

    num_rows: int
    short: bool
    max_blocks: int
    depths: tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    """The memory that a graph reads, and the features that it writes. Places share their block table."""

    batch: PrefillBatch
    lists: FixedLists
    features: Features | None

    def load(self, batch: PrefillBatch) -> None:
        """Bring a filled batch to it."""
        self.batch.tokens_T.copy_(batch.tokens_T)
        self.batch.positions_T.copy_(batch.positions_T)
        self.batch.slots_T.copy_(batch.slots_T)
        num_sequences, num_columns = batch.block_table_RB.shape
        self.batch.block_table_RB[:num_sequences, :num_columns] = batch.block_table_RB
        self.lists.load(batch.query_lens, batch.context_lens)


class PrefillGraphs:
    """The passes of prompts through a model, on a GPU by graphs where they have at most `max_rows` rows.

    `takes_lists`: its attention can be captured. `rewrites`: attention first widens the pages of contexts,
    or computes others from them; their number is then a part of what a graph is for. `max_positions`: long
    prompts whose contexts have more in all have no graph, because its memory stays in use.
    """

    def __init__(
        self,
        hidden: Hidden,
        device: torch.device,
        *,
        block_size: int,
        max_model_len: int,
        max_rows: int,
        takes_lists: bool,
        rewrites: bool,
        max_positions: int | None = None,
    ) -> None:
        self._hidden = hidden
        self._device = device
        self._block_size = block_size
        self._num_columns = -(-max(max_model_len, MAX_ROWS) // block_size) + 1
        self._max_rows = min(max_rows, MAX_ROWS)
        self._rewrites = rewrites
        self._max_positions = max_positions
        self._fills = device.type == "cuda" and takes_lists
        self._graphs: Graphs[Tensor] = Graphs(device, 1, warmups=0)
        self._places: dict[_Key, _Place] = {}
        self._kept_TD: Tensor | None = None
        self._table_RB: Tensor | None = None

    def run(self, batch: PrefillBatch, *, short: bool, features: Features | None = None) -> Tensor:
        """Return the stream [T, D] after the last layer, of the batch's rows and those that fill it up, and
        fill in `features` of its rows. The stream is overwritten by the next pass."""
        num_rows = len(batch.tokens_T)
        fits = size_of(num_rows) <= self._max_rows and len(batch.query_lens) < MAX_SEQUENCES
        if not (self._fills and fits):
            return self._hidden(batch, short, features, None)
        filled = filled_up(batch, self._block_size)
        key = self._key(filled, short, features)
        most = self._max_positions
        if most is not None and not short and key.max_blocks * self._block_size > most:
            return self._hidden(batch, short, features, None)
        place = self._places.get(key) or self._new_place(key, filled, features)
        place.load(filled)
        operands = place.batch, short, place.features, place.lists
        if key in self._places:
            x_TD = self._graphs.run(key, lambda: self._kept(self._hidden(*operands)))
        else:
            x_TD = self._kept(self._hidden(*operands))
            self._graphs.prepare(key, lambda: self._kept(self._hidden(*operands)))
            self._places[key] = place
        if features is not None and place.features is not None:
            features.rows_TE.copy_(place.features.rows_TE[:num_rows])
        return x_TD

    def _kept(self, x_TD: Tensor) -> Tensor:
        """Return the stream in the memory that the results of all graphs share."""
        if self._kept_TD is None:
            self._kept_TD = x_TD.new_empty(self._max_rows, x_TD.shape[1])
        return self._kept_TD[: len(x_TD)].copy_(x_TD)

    def _key(self, filled: PrefillBatch, short: bool, features: Features | None) -> _Key:
        depths = () if features is None else features.depths
        max_blocks = 0
        if self._rewrites:
            needed = sum(-(-length // self._block_size) for length in filled.context_lens)
            max_blocks = 1 << (needed - 1).bit_length()
        return _Key(len(filled.tokens_T), short, max_blocks, depths)

    def _new_place(self, key: _Key, filled: PrefillBatch, features: Features | None) -> _Place:
        if self._table_RB is None:
            self._table_RB = filled.block_table_RB.new_full((MAX_SEQUENCES, self._num_columns), PADDING_BLOCK)
        batch = replace(
            filled,
            tokens_T=torch.empty_like(filled.tokens_T),
            positions_T=torch.empty_like(filled.positions_T),
            slots_T=torch.empty_like(filled.slots_T),
            block_table_RB=self._table_RB,
        )
        lists = FixedLists(key.num_rows, MAX_SEQUENCES, key.max_blocks, self._device)
        return _Place(batch, lists, None if features is None else features.like(key.num_rows))


def filled_up(batch: PrefillBatch, block_size: int) -> PrefillBatch:
    """Return the batch with a sequence more, in the padding block, that makes up the rows of a graph."""
    num_rows = len(batch.tokens_T)
    missing = size_of(num_rows) - num_rows
    if missing == 0:
        return batch
    places_T = torch.arange(missing, device=batch.slots_T.device) % block_size
    columns = max(batch.block_table_RB.shape[1], -(-missing // block_size))
    table_RB = F.pad(
        batch.block_table_RB, (0, columns - batch.block_table_RB.shape[1], 0, 1), value=PADDING_BLOCK
    )
    return replace(
        batch,
        tokens_T=F.pad(batch.tokens_T, (0, missing)),
        positions_T=torch.cat((batch.positions_T, places_T)),
        slots_T=torch.cat((batch.slots_T, PADDING_BLOCK * block_size + places_T)),
        block_table_RB=table_RB,
        query_lens=(*batch.query_lens, missing),
        context_lens=(*batch.context_lens, missing),
        next_tokens=(*batch.next_tokens, ()),
    )


def size_of(num_rows: int) -> int:
    """Return the least number of rows that graphs are captured for, of at least so many rows."""
    step = max(LEAST_STEP, (1 << (num_rows - 1).bit_length()) // 32)
    return -(-num_rows // step) * step
