"""The device state of speculative decode steps: each request's last tokens, context, limit of tokens and
blocks.

A step ends by writing what the next step reads (`kernels/step/verify.py`), so steps follow one another
without the host. The host writes everything when requests come or go (`load`), and the block table when
sequences get new blocks (`set_blocks`). That is one transfer which waits for nothing: the host has two copies
of the table and uses them in turn, because the last transfer may still run.

Padding rows fill a batch up to the size of a graph: two tokens in the padding block, which no step changes.
Positions after the last block of a request are in that block too: proposals beyond what a row may keep are
computed like the others, and their results are never read. The same holds for a whole row whose request turns
out to have ended one step ago.

Shapes: R rows of a step, S rows of the state, Q tokens of a row that are fed, K proposed, N = K + 1, T = R Q,
B blocks of the longest sequence and of the proposals after it, D hidden, E features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PADDING_BLOCK
from compress.kernels.step.host_memory import host_visible
from compress.kernels.step.verify import CONTEXT, VerifyBuffers, end_verify, place_rows
from compress.runtime.batch import Features
from compress.runtime.decode_run import host_results
from compress.runtime.generation import Generation
from compress.runtime.graphs import positions_of_graph
from compress.runtime.model_runner import ModelRunner
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows

PADDING_LEN = 2
"""Tokens of a padding row: proposers read the last two tokens of every row."""


@dataclass(frozen=True)
class FedRows:
    """Rows of one call of the decode kernels: `rows` are their indices among all T, `requests` those of their
    requests among all R.
    """

    rows: slice
    requests: slice
    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    table_RB: Tensor
    context_lens_R: Tensor


class SpeculativeState:
    """Device tensors for at most `max_rows` requests of at most `max_model_len` tokens, with k proposed
    tokens each.

    `plan` and `sampling` are the sampling parameters of the loaded requests, `sampling_of_all` those of every
    token of a step that verifies k proposals. `results[n % 2]` are those of step n since `load`: tokens [S, 2
    + N] (how many proposals could be kept, how many were, and the tokens) and log probabilities [S, N].
    """

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

        self.buffers = VerifyBuffers(
            rows_SC=zeros(max_rows, k + 5),
            held_SX=zeros(max_rows, num_columns),
            proposed_S=zeros(max_rows) + k,
            drafts_SK=zeros(max_rows, k),
            host_results_2SY=host_visible(2, max_rows, k + 3, dtype=torch.int64, device=device),
            host_logprobs_2SN=host_visible(2, max_rows, k + 1, dtype=torch.float32, device=device),
        )
        self.results = host_results(self.buffers.host_results_2SY, self.buffers.host_logprobs_2SN, device)
        self.last_SN = self.buffers.rows_SC[:, :CONTEXT]
        self.context_lens_S = self.buffers.rows_SC[:, CONTEXT]
        self._narrow(0)
        self._host_rows = on_host(max_rows, k + 5)
        self._held = np.zeros((max_rows, num_columns), dtype=np.int64)
        self._host_held = [on_host(max_rows, num_columns), on_host(max_rows, num_columns)]
        """Copies of `_held` for transfers: the first is free, the transfer of the second may still run."""
        self._host_drafts = on_host(max_rows, k)
        self._host_counts = on_host(max_rows) + k
        self._has_counts = False
        self.sampling = SamplingRows.of((), device, pad_to=max_rows)
        self.sampling_of_all = SamplingRows.of((), device, pad_to=max_rows * (k + 1))
        self._params: list[SamplingParams] = []
        self.plan = SamplingPlan.of(())

    def load(self, generations: Sequence[Generation]) -> None:
        """Assign rows 0, 1, ... to these requests and make the others padding. The device must have finished
        all earlier steps.
        """
        num_last = self.last_SN.shape[1]
        num_padding = self.max_rows - len(generations)
        loaded = []
        for each in generations:
            last = each.tokens[-num_last:]
            loaded.append([*[0] * (num_last - len(last)), *last, len(each.tokens), 1, each.end, 0])
        padding = [*[0] * num_last, PADDING_LEN, 0, 0, 0]
        self._host_rows.copy_(torch.tensor(loaded + [padding] * num_padding))
        self.buffers.rows_SC.copy_(self._host_rows, non_blocking=True)
        self._held[:] = PADDING_BLOCK
        self._narrow(0)
        self.set_blocks({row_idx: each.blocks for row_idx, each in enumerate(generations)})
        if (params := [each.request.params for each in generations]) != self._params:
            self._params = params
            self.plan = SamplingPlan.of(params)
            self.sampling.copy_(SamplingRows.of(params, self.device, pad_to=self.max_rows))
            self.sampling_of_all.copy_(self.sampling.repeated(self.k + 1))

    def set_blocks(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """Set the blocks of these rows for the steps launched from now on.

        The caller has waited for the step before the last one launched, and with it for the last transfer but
        one.
        """
        for row_idx, own in blocks.items():
            self._held[row_idx, : 1 + len(own)] = [len(own) * self._block_size, *own]
        # Proposals that are never kept may lie after the blocks of a row.
        longest = max((len(own) for own in blocks.values()), default=0) * self._block_size + self.k
        self._narrow(max(self.num_blocks, -(-positions_of_graph(longest) // self._block_size)))
        free, last = self._host_held
        free.copy_(torch.from_numpy(self._held))
        self._send(free)
        self._host_held = [last, free]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of a context in the graphs of the loaded requests."""
        return self.table_SB.shape[1]

    def _narrow(self, num_blocks: int) -> None:
        self.table_SB = self.buffers.held_SX[:, 1 : 1 + num_blocks]

    def _send(self, held_SX: Tensor) -> None:
        self.buffers.held_SX.copy_(held_SX, non_blocking=True)

    @contextmanager
    def only_padding(self) -> Iterator[None]:
        """Replace all rows by padding within the block, so that warm-up steps change no request and write no
        results.
        """
        kept = self.buffers.rows_SC.clone(), self.buffers.held_SX.clone()
        self.buffers.rows_SC.zero_()
        self.buffers.held_SX.fill_(PADDING_BLOCK)
        self.context_lens_S.fill_(PADDING_LEN)
        try:
            yield
        finally:
            self.buffers.rows_SC.copy_(kept[0])
            self.buffers.held_SX.copy_(kept[1])

    def propose(self, tokens_RK: Tensor, counts: Sequence[int] | None) -> None:
        """Set the proposals that the next step verifies: at most `counts` of each row, or all where that is
        None.
        """
        num_rows = len(tokens_RK)
        if counts is not None or self._has_counts:
            self._host_counts.fill_(self.k)
            if counts is not None:
                self._host_counts[:num_rows] = torch.tensor(counts)
            self.buffers.proposed_S.copy_(self._host_counts, non_blocking=True)
            self._has_counts = counts is not None
        if tokens_RK.device.type == "cpu":
            self._host_drafts[:num_rows] = tokens_RK
            tokens_RK = self._host_drafts[:num_rows]
        self.buffers.drafts_SK[:num_rows].copy_(tokens_RK, non_blocking=True)

    def end(self, tokens_RQ: Tensor, accepted_R: Tensor | None, logprobs_RQ: Tensor | None) -> None:
        """End a step that chose these tokens. It keeps the proposals that equal them, or the number that
        `accepted_R` gives.
        """
        end_verify(self.buffers, tokens_RQ, accepted_R, logprobs_RQ)

    def fed(self, tokens_RQ: Tensor, context_lens_R: Tensor, *, max_rows: int) -> Iterator[FedRows]:
        """Yield the rows that feed these tokens at the ends of contexts of these lengths, at most `max_rows`
        at a time.
        """
        (num_rows, q_len) = tokens_RQ.shape
        tokens_T = tokens_RQ.flatten()
        table_RB = self.table_SB[:num_rows]
        # Only proposals that are never kept lie after the last position.
        positions_T, slots_T = place_rows(
            context_lens_R, table_RB, q_len, block_size=self._block_size, last_position=self._last_position
        )
        per_part = max_rows // q_len
        for start in range(0, num_rows, per_part):
            part = slice(start, min(start + per_part, num_rows))
            rows = slice(part.start * q_len, part.stop * q_len)
            yield FedRows(
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
        """Return float32 logits [R Q, V] of rows that feed these tokens at the ends of contexts of these
        lengths.

        `features` are filled in. No more rows run at once than the decode kernels of the model were selected
        for.
        """
        q_len = tokens_RQ.shape[1]
        logits = []
        for fed in self.fed(tokens_RQ, context_lens_R, max_rows=runner.max_decode_rows):
            x_TD = F.embedding(fed.tokens_T, runner.embedding)
            own = None if features is None else Features(features.depths, features.rows_TE[fed.rows])
            where = fed.positions_T, fed.slots_T, fed.table_RB, fed.context_lens_R
            logits.append(runner.decode(x_TD, *where, q_len=q_len, features=own))
        return logits[0] if len(logits) == 1 else torch.cat(logits)
