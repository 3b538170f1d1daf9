"""What a speculative step reads on the device: for each row its last two tokens, its context, what may be verified, and its blocks.

The host writes all of it before each step, in one transfer; a step changes nothing here but the proposed tokens. So a step may be run
again, as a graph is when it is captured, with the same result.

Rows beyond the requests fill up a batch to a size for which there is a graph: two tokens in the padding block. Positions behind the last
block of a request are in that block too: what is proposed beyond a row's limit is computed like the rest and never looked at.

Shapes: R rows of a step, S rows of the state, Q tokens of a row that are fed, K proposed, B blocks of the longest sequence and of what may
be proposed behind it, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.paged import PADDING_BLOCK
from compress.runtime.model_runner import ModelRunner
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows

FILLER_LEN = 2
_FACTS = 4


@dataclass(frozen=True)
class RunningRow:
    """A running request as the host sees it: all its tokens, its blocks, and how many proposed tokens may be verified in this step."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    params: SamplingParams
    limit: int


class SpeculativeState:
    """Tensors for at most `max_rows` requests of at most `max_model_len` tokens, with k proposed tokens."""

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, k: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.k = k
        self.device = device
        self._block_size = block_size
        self._last_position = max_model_len
        num_columns = -(-(max_model_len + k) // block_size)
        pinned = device.type == "cuda"
        self._host = torch.zeros(max_rows, _FACTS + num_columns, dtype=torch.int64, pin_memory=pinned)
        self._packed = torch.zeros(max_rows, _FACTS + num_columns, dtype=torch.int64, device=device)
        self.last_two_S2 = self._packed[:, :2]
        self.context_lens_S = self._packed[:, 2]  # tokens known, the last of which is yet to be fed
        self._limits_S = self._packed[:, 3]
        self.table_SB = self._packed[:, _FACTS:]
        self.drafts_SK = torch.zeros(max_rows, k, dtype=torch.int64, device=device)
        self._host_drafts = torch.zeros(max_rows, k, dtype=torch.int64, pin_memory=pinned)
        self._counts = torch.zeros(max_rows, dtype=torch.int64, pin_memory=pinned)
        self.counts_S = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingRows.of((), device, pad_to=max_rows)
        self._params: list[SamplingParams] = []
        self.plan = SamplingPlan.of(())

    def load(self, rows: Sequence[RunningRow]) -> None:
        """Rows 0, 1, ... become these requests, the others fillers. The device must have finished all earlier steps."""
        num_columns = self.table_SB.shape[1]
        filler = [0, 0, FILLER_LEN, 0, *[PADDING_BLOCK] * num_columns]
        packed = [
            [*row.tokens[-2:], len(row.tokens), row.limit, *row.blocks, *[PADDING_BLOCK] * (num_columns - len(row.blocks))] for row in rows
        ]
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

    def logits(self, runner: ModelRunner, tokens_RQ: Tensor, context_lens_R: Tensor) -> Tensor:
        """Float32 [R Q, V] of rows that feed these tokens at the end of contexts of this length.

        No more rows go through the model at once than its decode kernels were chosen for.
        """
        q_len = tokens_RQ.shape[1]
        positions_RQ = context_lens_R.unsqueeze(1) + torch.arange(-q_len, 0, device=self.device)
        table_RB = self.table_SB[: len(tokens_RQ)]
        blocks_RQ = table_RB.gather(1, torch.div(positions_RQ, self._block_size, rounding_mode="floor"))
        slots_RQ = blocks_RQ * self._block_size + positions_RQ % self._block_size
        positions_RQ = positions_RQ.clamp(max=self._last_position)  # behind the last is only what is behind a limit
        x_TD = F.embedding(tokens_RQ.flatten(), runner.embedding)
        per_call = runner.max_decode_rows // q_len
        parts = zip(
            *(each.split(per_call * q_len) for each in (x_TD, positions_RQ.flatten(), slots_RQ.flatten())),
            *(each.split(per_call) for each in (table_RB, context_lens_R)),
            strict=True,
        )
        logits = [runner.decode(*part, q_len=q_len) for part in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits)
