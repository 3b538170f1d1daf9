"""The operands of a pass through a model, and its results besides logits.

Shapes: T rows, D hidden, E = several D, B blocks of the longest sequence, R sequences, W rows wanted, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

LATER_TOKENS = 8
"""Tokens after a chunk that a batch has: rows of heads that draft read some, one more for each head."""


@dataclass(frozen=True)
class PrefillBatch:
    """The ragged rows of one prefill pass: a chunk of each of R prompts.

    `context_lens` count a sequence up to the end of its chunk: its last row has position `context_lens[r] -
    1`. Block tables are padded with block 0. `wanted_rows` are the indices, among the T rows, of those whose
    logits are wanted. `next_tokens` are those of the prompt after each chunk, at most `LATER_TOKENS`.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_table_RB: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    wanted_rows_W: Tensor
    next_tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Features:
    """The hidden states of a pass that a proposer reads.

    `rows_TE` holds the hidden states after each of `depths` layers (0: the embedding), not normalized,
    concatenated.
    """

    depths: tuple[int, ...]
    rows_TE: Tensor

    @staticmethod
    def empty(depths: Sequence[int], num_rows: int, embed_VD: Tensor) -> "Features":
        """Return features of `num_rows` rows that are yet to be filled in."""
        return Features(tuple(depths), embed_VD.new_empty(num_rows, len(depths) * embed_VD.shape[1]))

    def like(self, num_rows: int) -> "Features":
        """Return features of the same depths, of `num_rows` rows that are yet to be filled in."""
        return Features(self.depths, self.rows_TE.new_empty(num_rows, self.rows_TE.shape[1]))

    def keep(self, depth: int, x_TD: Tensor, scale: float) -> None:
        """Store the hidden states x * scale after `depth` layers, if they are wanted."""
        if depth in self.depths:
            start = self.depths.index(depth) * x_TD.shape[1]
            self.rows_TE[:, start : start + x_TD.shape[1]] = x_TD if scale == 1 else x_TD * scale


def slots_of(positions_T: Tensor, blocks_B: Tensor, block_size: int) -> Tensor:
    """Return the slots [T] of positions of a sequence that has these blocks."""
    return blocks_B[positions_T // block_size] * block_size + positions_T % block_size
