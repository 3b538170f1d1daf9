"""What a decode step reads and advances, on the device: for each row its last token, its context, its blocks and its sampling parameters.

A step serves one row a request. Its kernels take everything from these tensors and the step ends by writing the next one's values
(`kernels/step/decode.py`), so steps follow one another without the host, and a captured graph can be replayed as it is. The host writes
only when requests come or go (`load`), or when a sequence is about to grow into a new block (`set_next_block`).

Rows beyond the requests fill up a batch to a size for which there is a graph: a context of one token that never grows, in the padding
block.

Shapes: R rows of a step, S rows of the state, B blocks of the longest sequence, and one more for the step that follows a request's last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.decode import StepState, begin_step, end_step, shared_memory
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import Choice, SamplingRows


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
        self._device = device
        num_columns = -(-max_model_len // block_size) + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._state = StepState(
            tokens_S=zeros(max_rows),
            context_lens_S=zeros(max_rows) + 1,
            running_S=zeros(max_rows),
            block_table_SB=zeros(max_rows, num_columns) + PADDING_BLOCK,
            num_steps=zeros(1),
            next_block_S=shared_memory(max_rows, dtype=torch.int64, device=device),
            landed_tokens_2S=shared_memory(2, max_rows, dtype=torch.int64, device=device),
            landed_logprobs_2S=shared_memory(2, max_rows, dtype=torch.float32, device=device),
        )
        next_block_S = self._state.next_block_S
        self._next_block: Any = (
            next_block_S if next_block_S.is_cuda else next_block_S.numpy()
        )  # an entry is written ten times faster
        self._sampling = self._sampling_of(())

    def clear(self) -> None:
        """Every row a filler: what a graph is captured and warmed up with."""
        self.load(())

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Rows 0, 1, ... become these requests, the others fillers, no step begun. The device must have finished all earlier steps."""
        state = self._state
        spare = self.max_rows - len(rows)
        num_columns = state.block_table_SB.shape[1]
        blocks = [[*row.blocks, *[PADDING_BLOCK] * (num_columns - len(row.blocks))] for row in rows]
        state.block_table_SB.copy_(torch.tensor([*blocks, *[[PADDING_BLOCK] * num_columns] * spare]))
        state.tokens_S.copy_(torch.tensor([*(row.token for row in rows), *[0] * spare]))
        state.context_lens_S.copy_(torch.tensor([*(row.context_len for row in rows), *[1] * spare]))
        state.running_S.copy_(torch.tensor([*[1] * len(rows), *[0] * spare]))
        state.num_steps.zero_()
        for row_idx, row in enumerate(rows):
            self._next_block[row_idx] = row.blocks[(row.context_len - 1) // self._block_size]
        self._sampling.copy_(self._sampling_of(rows))

    def set_next_block(self, row_idx: int, block: int) -> None:
        """The block that a running row enters with the next step to be launched. It has read the one before, at least a block ago."""
        self._next_block[row_idx] = block

    def begin(self, num_rows: int, embed_VD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `ModelRunner.decode` takes of the first rows' next step: embeddings, positions, slots, block table, context lengths."""
        state = self._state
        x_RD, positions_R, slots_R = begin_step(state, num_rows, embed_VD, block_size=self._block_size)
        return x_RD, positions_R, slots_R, state.block_table_SB[:num_rows], state.context_lens_S[:num_rows]

    def end(self, choice: Choice) -> None:
        """The step chose these tokens."""
        end_step(self._state, choice.tokens_R, choice.logprobs_R)

    def sampling(self, num_rows: int) -> SamplingRows:
        return self._sampling.first(num_rows)

    def landed(self, step: int) -> tuple[Tensor, Tensor]:
        """Where tokens [S] and log probabilities [S] of step 1, 2, ... since `load` are once it is done; step + 2 takes the same place."""
        return self._state.landed_tokens_2S[step % 2], self._state.landed_logprobs_2S[step % 2]

    def _sampling_of(self, rows: Sequence[DecodeRow]) -> SamplingRows:
        return SamplingRows.of([row.params for row in rows], self._device, pad_to=self.max_rows)
