"""A head that proposes k tokens from the target model's own hidden states: the passes, caches and states that
all kinds of heads share.

Row t of the head reads the hidden state of token t and the embedding of token t + 1, so a chunk of a prompt
gives the rows of its tokens, without the last of the prompt, whose next token is yet to be chosen. The head's
keys and values have pages of their own, with the block numbers of the target's cache. So the prefix cache
shares both, and rows of tokens that it holds need no hidden states (`prefix_cache.py`).

What the head makes of the target's hidden states, f, is kept in a ring of each block for the last positions
in it. A verification writes up to k + 1 of them. Those of rejected tokens are overwritten when their
positions come again. A step first feeds the last k + 1 rows: the new ones among them replace keys and values
that the head computed from its own hidden states. Then it feeds its own choice k - 1 times, with the hidden
state that the choice was made from. If a sequence is shorter than k + 1, it also feeds positions after its
end, whose results are never read. So all that a step needs of a request are its length, its last tokens and
its blocks. It writes to no block that is in the prefix cache, and reads no ring of such a block.

With the rule "coupled" a head draws with the target's noise of each token, and with "rejection" it returns
whole distributions. On CUDA all k passes are one graph.

Shapes: R requests, S rows of the state, K tokens proposed, Q tokens of a request that are fed, T rows, L of
them that are kept, N slots of the rings, D hidden, E features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS, PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.problem import Phase
from compress.kernels.step.host_memory import sent
from compress.models.arch import Arch
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import FedRows, SpeculativeState


@dataclass(frozen=True)
class HeadCache:
    """The pages of a head, which is one layer, in blocks of `block_size` positions."""

    pages: PagedKV | PagedLatents
    block_size: int


@dataclass(frozen=True)
class PromptRows:
    """Rows of a head for prompts: the tokens and the hidden states that they read, their positions and the
    slots of their keys and values."""

    tokens_T: Tensor
    hidden_TD: Tensor
    positions_T: Tensor
    slots_T: Tensor


class Head(Protocol):
    """A head whose weights are on the device. `weight_bytes` are read by one pass of it."""

    kind: str
    arch: Arch
    feature_layers: tuple[int, ...]

    @property
    def weight_bytes(self) -> int: ...

    def begin(self, target: ModelRunner, *, max_model_len: int, max_rows: int) -> None:
        """Select the kernels of its layers, and take from the target's runner what it shares with it;
        `max_rows` logits are wanted at once."""

    def fused(self, features_TE: Tensor, phase: Phase) -> Tensor:
        """Return f [T, D] of the target's hidden states."""

    def store(self, rows: PromptRows, cache: HeadCache, phase: Phase) -> None:
        """Write the keys and values of rows of prompts."""

    def hidden(self, fed: FedRows, hidden_TD: Tensor, cache: HeadCache, *, q_len: int) -> Tensor:
        """Return the hidden states [T, D] of rows that read these hidden states, at the ends of their
        contexts."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V] of the target's vocabulary, which the next call may overwrite; minus
        infinity for tokens that the head does not have."""

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""


class HeadProposer:
    """Proposes tokens by a head. Its pages are allocated by `begin`."""

    on_device = True
    bytes_per_request = 0

    def __init__(self, head: Head, setting: ProposerSetting) -> None:
        deployment = setting.deployment
        self.feature_layers = head.feature_layers
        self._head = head
        self._setting = setting
        self._kv_format = DENSE_FORMATS[deployment.dtype]
        self.num_feature_rows = setting.k + 1
        self._ring = 2 * (setting.k + 1)
        """Positions in a ring: a step reads the last k + 1 of a request, and up to k more follow them."""
        self.weight_bytes = head.weight_bytes
        ring_bytes = self._ring * head.arch.hidden_size * deployment.dtype.itemsize
        self.kv_bytes_per_token = kv_bytes_per_token(head.arch, self._kv_format) + -(
            -ring_bytes // setting.block_size
        )

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Allocate pages and rings.

        Raises:
            UsageError: the head has fewer positions than the engine serves.
        """
        deployment = self._setting.deployment
        arch = self._head.arch
        if arch.max_position < sizes.max_model_len:
            raise UsageError(
                f"the {self._head.kind} has {arch.max_position} positions and the engine serves sequences of "
                f"{sizes.max_model_len} tokens; set max_model_len to {arch.max_position} at most."
            )
        device = deployment.device
        self._kv_cache = KVCache(
            arch,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            kv_format=self._kv_format,
            device=device,
        )
        pages = self._kv_cache.layer(0)
        assert isinstance(pages, (PagedKV, PagedLatents))
        self._cache = HeadCache(pages, sizes.block_size)
        self._max_rows = max(deployment.max_decode_rows, SHORT_PROMPT_ROWS)
        self._rings_ND = torch.zeros(
            sizes.num_blocks * self._ring, arch.hidden_size, dtype=deployment.dtype, device=device
        )
        self._graphs: Graphs[Tensor] = Graphs(device, deployment.max_batch_size)
        max_rows = self._graphs.max_rows
        self._head.begin(target, max_model_len=sizes.max_model_len, max_rows=max_rows)
        shape = max_rows, self._setting.k, arch.vocab_size
        self._probs_SKV = (
            torch.zeros(shape, dtype=torch.float64, device=device) if self._setting.draws else None
        )

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self._head.kernel_report()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in the head's pages. A request goes on after them,
        so nobody reads what the rings keep of them."""
        self._kv_cache.copy_blocks(pairs)

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Write the head's keys and values of the chunks, and to the rings what the first step reads."""
        assert features is not None
        phase: Phase = "decode" if short else "prefill"
        device = features.rows_TE.device
        rows_T, next_T, kept_L, owners_L = (
            sent(each, device) for each in _chunk_rows(batch.query_lens, batch.next_tokens, self._ring)
        )
        fused_TD = self._head.fused(features.rows_TE, phase)
        if len(rows_T):
            after_R = sent(torch.tensor([each or 0 for each in batch.next_tokens]), device)
            tokens_T = torch.cat((batch.tokens_T, after_R))[next_T]
            where = batch.positions_T[rows_T], batch.slots_T[rows_T]
            self._head.store(PromptRows(tokens_T, fused_TD[rows_T], *where), self._cache, phase)
        kept_slots_L1 = self._ring_slots(
            batch.block_table_RB[owners_L], batch.positions_T[kept_L].unsqueeze(1)
        )
        self._rings_ND[kept_slots_L1.flatten()] = fused_TD[kept_L]

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Write to the rings what the next step reads of the hidden states."""
        fused_TD = torch.cat(
            [self._head.fused(part, "decode") for part in features.rows_TE.split(self._max_rows)]
        )
        num_rows = len(fused_TD) // q_len
        positions_RQ = state.context_lens_S[:num_rows].unsqueeze(1) + torch.arange(
            -1, q_len - 1, device=state.device
        )
        self._rings_ND[self._ring_slots(state.table_SB[:num_rows], positions_RQ).flatten()] = fused_TD

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        """Propose k tokens for every request, also where fewer may be kept."""
        num_rows = self._graphs.num_rows(len(generations))
        plan = replace(state.plan, logprobs=False)
        tokens_RK = self._graphs.run((num_rows, plan), lambda: self._draft(state, num_rows, plan))
        return Drafts(tokens_RK[: len(generations)], probs_SKV=self._probs_SKV)

    def _draft(self, state: SpeculativeState, num_rows: int, plan: SamplingPlan) -> Tensor:
        """Run the k passes; return the proposed tokens [R, K]."""
        sampling = state.sampling.first(num_rows)
        lens_R = state.context_lens_S[:num_rows]
        tokens = []
        if self._probs_SKV is not None:
            sampling = stream(sampling, PROPOSAL_STREAM)
        hidden_RD = self._first_hidden(state, num_rows)
        for step in range(state.k):
            logits_RV = self._head.logits(hidden_RD)
            tokens_R1 = sample_rows(logits_RV, sampling, lens_R + step, plan).tokens_R.unsqueeze(1)
            tokens.append(tokens_R1)
            if self._probs_SKV is not None and plan.draws:
                self._probs_SKV[:num_rows, step] = distribution(logits_RV, sampling, plan)
            if step < state.k - 1:
                hidden_RD = self._hidden(state, tokens_R1, hidden_RD, lens_R + step)
        return torch.cat(tokens, dim=1)

    def _first_hidden(self, state: SpeculativeState, num_rows: int) -> Tensor:
        """Feed the last k + 1 rows of each sequence; return the hidden state [R, D] of its last row."""
        lens_R = state.context_lens_S[:num_rows]
        q_len = state.k + 1
        fed_R = (lens_R - 1).clamp(min=q_len)  # rows in the cache afterwards
        steps_Q = torch.arange(q_len, device=state.device)
        positions_RQ = (fed_R - q_len).unsqueeze(1) + steps_Q
        columns_RQ = ((fed_R - lens_R + 1).unsqueeze(1) + steps_Q).clamp(max=q_len - 1)
        tokens_RQ = state.last_SN[:num_rows].gather(1, columns_RQ)
        hidden_TD = self._rings_ND[self._ring_slots(state.table_SB[:num_rows], positions_RQ).flatten()]
        hidden_TD = self._hidden(state, tokens_RQ, hidden_TD, fed_R)
        last_R = torch.arange(num_rows, device=state.device) * q_len + (lens_R - 2 - (fed_R - q_len))
        return hidden_TD[last_R]

    def _hidden(
        self, state: SpeculativeState, tokens_RQ: Tensor, hidden_TD: Tensor, context_lens_R: Tensor
    ) -> Tensor:
        """Return the hidden states [T, D] of rows that read these tokens and hidden states at the ends of
        contexts of these lengths.
        """
        q_len = tokens_RQ.shape[1]
        outputs = [
            self._head.hidden(fed, hidden_TD[fed.rows], self._cache, q_len=q_len)
            for fed in state.fed(tokens_RQ, context_lens_R, max_rows=self._max_rows)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _ring_slots(self, table_RB: Tensor, positions_RQ: Tensor) -> Tensor:
        """Return the slots [R, Q] of these positions in the rings."""
        blocks_RQ = table_RB.gather(1, positions_RQ // self._cache.block_size)
        return blocks_RQ * self._ring + positions_RQ % self._ring


def _chunk_rows(
    query_lens: Sequence[int], next_tokens: Sequence[int | None], ring: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices that prefill reads and keeps, for ragged chunks.

    `rows_T` are the tokens that give a row of the head: all whose next token is known. `next_T` are their
    next tokens, among the tokens of the chunks and then the R after the chunks. `kept_L` are the last tokens
    of each chunk, which the rings keep, and `owners_L` their sequences.
    """
    rows = list[int]()
    after = list[int]()
    kept = list[int]()
    owners = list[int]()
    num_tokens = sum(query_lens)
    first = 0
    for idx, (queries, next_token) in enumerate(zip(query_lens, next_tokens, strict=True)):
        chunk = range(first, first + queries)
        rows += chunk if next_token is not None else chunk[:-1]
        after += [*chunk[1:], *([num_tokens + idx] if next_token is not None else [])]
        kept += chunk[-ring:]
        owners += [idx] * len(chunk[-ring:])
        first = chunk.stop
    rows_T, next_T, kept_L, owners_L = (
        torch.tensor(each, dtype=torch.int64) for each in (rows, after, kept, owners)
    )
    return rows_T, next_T, kept_L, owners_L
