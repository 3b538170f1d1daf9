"""What a speculative step reads on the device: for each row its last tokens, its context, what may be verified, and its blocks.

The host writes all of it before each step, in one transfer; a step changes nothing here but the proposed tokens. So a step may be run
again, as a graph is when it is captured, with the same result.

Rows beyond the requests fill up a batch to a size for which there is a graph: two tokens in the padding block. Positions behind the last
block of a request are in that block too: what is proposed beyond a row's limit is computed like the rest and never looked at.

Shapes: R rows of a step, S rows of the state, Q tokens of a row that are fed, K proposed, N = K + 1, T = R Q, B blocks of the longest
sequence and of what may be proposed behind it, D hidden, E features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.paged import PADDING_BLOCK
from compress.runtime.model_runner import Features, ModelRunner
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows

FILLER_LEN = 2


@dataclass(frozen=True)
class RunningRow:
    """A running request as the host sees it: all its tokens, its blocks, and how many proposed tokens may be verified in this step."""

    tokens: Sequence[int]
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

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, k: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.k = k
        self.device = device
        self._block_size = block_size
        self._last_position = max_model_len
        num_columns = k + 3 + -(-(max_model_len + k) // block_size)
        pinned = device.type == "cuda"
        self._host = torch.zeros(max_rows, num_columns, dtype=torch.int64, pin_memory=pinned)
        self._packed = torch.zeros(max_rows, num_columns, dtype=torch.int64, device=device)
        self.last_SN = self._packed[:, : k + 1]  # the last tokens; of a shorter sequence zeros before them
        self.context_lens_S = self._packed[:, k + 1]  # tokens known, the last of which is yet to be fed
        self._limits_S = self._packed[:, k + 2]
        self.table_SB = self._packed[:, k + 3 :]
        self.drafts_SK = torch.zeros(max_rows, k, dtype=torch.int64, device=device)
        self._host_drafts = torch.zeros(max_rows, k, dtype=torch.int64, pin_memory=pinned)
        self._counts = torch.zeros(max_rows, dtype=torch.int64, pin_memory=pinned)
        self.counts_S = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingRows.of((), device, pad_to=max_rows)
        self._params: list[SamplingParams] = []
        self.plan = SamplingPlan.of(())

    def load(self, rows: Sequence[RunningRow]) -> None:
        """Rows 0, 1, ... become these requests, the others fillers. The device must have finished all earlier steps."""
        num_columns, num_last = self.table_SB.shape[1], self.last_SN.shape[1]
        filler = [*[0] * num_last, FILLER_LEN, 0, *[PADDING_BLOCK] * num_columns]
        packed = []
        for row in rows:
            last = row.tokens[-num_last:]
            blocks = [*row.blocks, *[PADDING_BLOCK] * (num_columns - len(row.blocks))]
            packed.append([*[0] * (num_last - len(last)), *last, len(row.tokens), row.limit, *blocks])
        self._host.copy_(torch.tensor(packed + [filler] * (self.max_rows - len(rows))))
        self._packed.copy_(self._host, non_blocking=True)
        if (params := [row.params for row in rows]) != self._params:
            self._params, self.plan = params, SamplingPlan.of(params)
            self.sampling.copy_(SamplingRows.of(params, self.device, pad_to=self.max_rows))

    def propose(self, tokens_RK: Tensor, counts: Sequence[int]) -> None:
        """These tokens are verified next, `counts` of each row and no more than its limit."""
        num_rows = len(counts)
        self._counts[:num_rows] = torch.tensor(counts)
        self._counts[num_rows:] = 0
        self.counts_S.copy_(self._counts, non_blocking=True)
        torch.minimum(self.counts_S, self._limits_S, out=self.counts_S)
        if tokens_RK.device.type == "cpu":
            self._host_drafts[:num_rows] = tokens_RK
            tokens_RK = self._host_drafts[:num_rows]
        self.drafts_SK[:num_rows].copy_(tokens_RK, non_blocking=True)

    def fed(self, tokens_RQ: Tensor, context_lens_R: Tensor, *, max_rows: int) -> Iterator[Fed]:
        """Rows that feed these tokens at the end of contexts of this length, in parts of at most `max_rows`."""
        num_rows, q_len = tokens_RQ.shape
        positions_RQ = context_lens_R.unsqueeze(1) + torch.arange(-q_len, 0, device=self.device)
        table_RB = self.table_SB[:num_rows]
        blocks_RQ = table_RB.gather(1, torch.div(positions_RQ, self._block_size, rounding_mode="floor"))
        slots_RQ = blocks_RQ * self._block_size + positions_RQ % self._block_size
        positions_RQ = positions_RQ.clamp(max=self._last_position)  # behind the last is only what is behind a limit
        per_part = max_rows // q_len
        for start in range(0, num_rows, per_part):
            part = slice(start, min(start + per_part, num_rows))
            tokens_T, positions_T, slots_T = (each[part].flatten() for each in (tokens_RQ, positions_RQ, slots_RQ))
            rows = slice(part.start * q_len, part.stop * q_len)
            yield Fed(rows, part, tokens_T, positions_T, slots_T, table_RB[part], context_lens_R[part])

    def logits(self, runner: ModelRunner, tokens_RQ: Tensor, context_lens_R: Tensor, features: Features | None = None) -> Tensor:
        """Float32 [R Q, V] of rows that feed these tokens at the end of contexts of this length; `features` are filled in.

        No more rows go through the model at once than its decode kernels were chosen for.
        """
        q_len, logits = tokens_RQ.shape[1], []
        for fed in self.fed(tokens_RQ, context_lens_R, max_rows=runner.max_decode_rows):
            x_TD = F.embedding(fed.tokens_T, runner.embedding)
            own = None if features is None else Features(features.depths, features.rows_TE[fed.rows])
            where = fed.positions_T, fed.slots_T, fed.table_RB, fed.context_lens_R
            logits.append(runner.decode(x_TD, *where, q_len=q_len, features=own))
        return logits[0] if len(logits) == 1 else torch.cat(logits)
