"""What a speculative step reads and advances, on the device: for each row its last tokens, its context, how far it may go, and its blocks.

A step ends by writing what the next one reads (`kernels/step/verify.py`), so steps follow one another without the host. The host writes
everything when requests come or go (`load`), and the block table when sequences get new blocks (`hold`), in one transfer that waits for
nothing: it lies in the host's memory in two places in turn, so that the last one may still be on its way.

Rows beyond the requests fill up a batch to a size for which there is a graph: two tokens in the padding block, which no step changes.
Positions behind the last block of a request are in that block too: what is proposed beyond what a row may keep is computed like the rest
and never looked at. So is a whole row of a request that turns out to have ended one step ago.

Shapes: R rows of a step, S rows of the state, Q tokens of a row that are fed, K proposed, N = K + 1, T = R Q, B blocks of the longest
sequence and of what may be proposed behind it, D hidden, E features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.decode import shared_memory
from compress.kernels.step.verify import CONTEXT, VerifyState, end_verify, place_rows
from compress.runtime.model_runner import Features, ModelRunner
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows

FILLER_LEN = 2


@dataclass(frozen=True)
class RunningRow:
    """A running request as the host sees it: all its tokens and how many they may become, its blocks, and how many proposed tokens may be
    verified in this step."""

    tokens: Sequence[int]
    end: int
    blocks: Sequence[int]
    params: SamplingParams
    limit: int


@dataclass(frozen=True)
class Fed:
    """Some rows as decode kernels take them: `rows` of all T, and `requests` of all R."""

    rows: slice
    requests: slice
    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    table_RB: Tensor
    context_lens_R: Tensor


class SpeculativeState:
    """Tensors for at most `max_rows` requests of at most `max_model_len` tokens, with k proposed tokens."""

    def __init__(
        self, *, max_rows: int, max_model_len: int, block_size: int, k: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.k = k
        self.device = device
        self._block_size = block_size
        self._last_position = max_model_len
        num_columns = 1 + -(-(max_model_len + k) // block_size)
        pinned = device.type == "cuda"

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def on_host(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)

        self.step = VerifyState(
            rows_SC=zeros(max_rows, k + 5),
            held_SX=zeros(max_rows, num_columns),
            proposed_S=zeros(max_rows) + k,
            drafts_SK=zeros(max_rows, k),
            landed_2SY=shared_memory(2, max_rows, k + 3, dtype=torch.int64, device=device),
            landed_logprobs_2SN=shared_memory(2, max_rows, k + 1, dtype=torch.float32, device=device),
        )
        self.last_SN = self.step.rows_SC[:, :CONTEXT]
        self.context_lens_S = self.step.rows_SC[:, CONTEXT]
        self.table_SB = self.step.held_SX[:, 1:]
        self._rows = on_host(max_rows, k + 5)
        self._held = np.zeros((max_rows, num_columns), dtype=np.int64)
        self._held_in_turn = on_host(max_rows, num_columns), on_host(max_rows, num_columns)
        self._drafts = on_host(max_rows, k)
        self._counts = on_host(max_rows) + k
        self._counted = False
        self.sampling = SamplingRows.of((), device, pad_to=max_rows)
        self.sampling_of_all = SamplingRows.of(
            (), device, pad_to=max_rows * (k + 1)
        )  # tokens of a step that verifies k proposals
        self._params: list[SamplingParams] = []
        self.plan = SamplingPlan.of(())

    def load(self, rows: Sequence[RunningRow]) -> None:
        """Rows 0, 1, ... become these requests, the others fillers, no step begun. The device must have finished all earlier steps."""
        num_last = self.last_SN.shape[1]
        spare = self.max_rows - len(rows)
        loaded = []
        for row in rows:
            last = row.tokens[-num_last:]
            loaded.append([*[0] * (num_last - len(last)), *last, len(row.tokens), 1, row.end, 0])
        self._rows.copy_(torch.tensor(loaded + [[*[0] * num_last, FILLER_LEN, 0, 0, 0]] * spare))
        self.step.rows_SC.copy_(self._rows, non_blocking=True)
        self._held[:] = PADDING_BLOCK
        self.hold({row_idx: row.blocks for row_idx, row in enumerate(rows)})
        if (params := [row.params for row in rows]) != self._params:
            self._params = params
            self.plan = SamplingPlan.of(params)
            self.sampling.copy_(SamplingRows.of(params, self.device, pad_to=self.max_rows))
            self.sampling_of_all.copy_(self.sampling.repeated(self.k + 1))

    def hold(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """From the next step to be launched on, these rows hold these blocks; the step before the last one launched has been waited for."""
        for row_idx, own in blocks.items():
            self._held[row_idx, : 1 + len(own)] = [len(own) * self._block_size, *own]
        here, other = self._held_in_turn
        here.copy_(torch.from_numpy(self._held))
        self._send(here)
        self._held_in_turn = other, here

    def _send(self, held_SX: Tensor) -> None:
        self.step.held_SX.copy_(held_SX, non_blocking=True)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Fillers in place of all rows, for as long as that: steps change nothing then, and land nothing."""
        kept = self.step.rows_SC.clone(), self.step.held_SX.clone()
        self.step.rows_SC.zero_()
        self.step.held_SX.fill_(PADDING_BLOCK)
        self.context_lens_S.fill_(FILLER_LEN)
        try:
            yield
        finally:
            self.step.rows_SC.copy_(kept[0])
            self.step.held_SX.copy_(kept[1])

    def propose(self, tokens_RK: Tensor, counts: Sequence[int] | None) -> None:
        """These tokens are verified next, as many as may be kept, and no more than `counts` of each row."""
        num_rows = len(tokens_RK)
        if counts is not None or self._counted:
            self._counts.fill_(self.k)
            if counts is not None:
                self._counts[:num_rows] = torch.tensor(counts)
            self.step.proposed_S.copy_(self._counts, non_blocking=True)
            self._counted = counts is not None
        if tokens_RK.device.type == "cpu":
            self._drafts[:num_rows] = tokens_RK
            tokens_RK = self._drafts[:num_rows]
        self.step.drafts_SK[:num_rows].copy_(tokens_RK, non_blocking=True)

    def end(self, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None) -> None:
        """The step chose these tokens, and keeps proposals that are the same; or, with `accepted` given, these come out of it."""
        end_verify(self.step, tokens_RQ, accepted_R, logprobs_RQ)

    def landed(self, step: int) -> tuple[Tensor, Tensor]:
        """What came of step 1, 2, ... since `load`, once it is done: [S, 2 + N], how many proposals could be kept, how many were, and the
        tokens; and log probabilities [S, N]. Step + 2 takes the same place."""
        return self.step.landed_2SY[step % 2], self.step.landed_logprobs_2SN[step % 2]

    def fed(self, tokens_RQ: Tensor, context_lens_R: Tensor, *, max_rows: int) -> Iterator[Fed]:
        """Rows that feed these tokens at the end of contexts of this length, in parts of at most `max_rows`."""
        (num_rows, q_len) = tokens_RQ.shape
        tokens_T = tokens_RQ.flatten()
        table_RB, last = (
            self.table_SB[:num_rows],
            self._last_position,
        )  # behind the last position is only what is never kept
        positions_T, slots_T = place_rows(
            context_lens_R, table_RB, q_len, block_size=self._block_size, last_position=last
        )
        per_part = max_rows // q_len
        for start in range(0, num_rows, per_part):
            part = slice(start, min(start + per_part, num_rows))
            rows = slice(part.start * q_len, part.stop * q_len)
            yield Fed(
                rows,
                part,
                tokens_T[rows],
                positions_T[rows],
                slots_T[rows],
                table_RB[part],
                context_lens_R[part],
            )

    def logits(
        self, runner: ModelRunner, tokens_RQ: Tensor, context_lens_R: Tensor, features: Features | None = None
    ) -> Tensor:
        """Float32 [R Q, V] of rows that feed these tokens at the end of contexts of this length; `features` are filled in.

        No more rows go through the model at once than its decode kernels were chosen for.
        """
        q_len = tokens_RQ.shape[1]
        logits = []
        for fed in self.fed(tokens_RQ, context_lens_R, max_rows=runner.max_decode_rows):
            x_TD = F.embedding(fed.tokens_T, runner.embedding)
            own = None if features is None else Features(features.depths, features.rows_TE[fed.rows])
            where = fed.positions_T, fed.slots_T, fed.table_RB, fed.context_lens_R
            logits.append(runner.decode(x_TD, *where, q_len=q_len, features=own))
        return logits[0] if len(logits) == 1 else torch.cat(logits)
