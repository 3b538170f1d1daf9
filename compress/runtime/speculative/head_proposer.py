"""A head that proposes k tokens from the target model's own hidden states: the passes, caches and states that
all kinds of heads share.

Row t of the head reads the hidden state of token t and the embedding of token t + 1, so a chunk of a prompt
gives the rows of its tokens, without the last of the prompt, whose next token is yet to be chosen. The head's
keys and values have pages of their own, with the block numbers of the target's cache. So the prefix cache
shares both, and rows of tokens that it holds need no hidden states (`prefix_cache.py`).

Several heads propose one token after the other, and the last of them all further ones. Row t of the i-th
reads the embedding of token t + i, and the hidden state of token t, or what the head before made of its row
t; the heads of such a chain compute whole layers of prompts. Where there are m heads, each step feeds the
last k + m rows of each, because the last m - 1 of the step before read proposals, which may have been
rejected. Tokens of these rows are in rings, too.

What the head makes of the target's hidden states, f, is kept in a ring of each block for the last positions
in it. A verification writes up to k + 1 of them. Those of rejected tokens are overwritten when their
positions come again. A step first feeds the last k + m rows: the new ones among them replace keys and values
that a head computed from its own hidden states. Then it feeds its own choice k - m times, with the hidden
state that the choice was made from. If a sequence is shorter than k + m, it also feeds positions after its
end, whose results are never read. So all that a step needs of a request are its length, its last tokens and
its blocks. It writes to no block that is in the prefix cache, and reads no ring of such a block.

With the rule "coupled" a head draws with the target's noise of each token, and with "rejection" it returns
whole distributions. On CUDA all k passes are one graph.

Shapes: R requests, S rows of the state, K tokens proposed, Q rows of a request that are fed, T rows, L of
them that are kept, N slots of the rings, D hidden, E features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS, PADDING_BLOCK, PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.problem import Phase
from compress.kernels.step.host_memory import sent
from compress.models.arch import Arch
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.kv_cache import IndexedKept, KVCache, kv_bytes_per_token
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import FedRows, SpeculativeState


@dataclass(frozen=True)
class HeadCache:
    """The pages of a head, which is one layer, in blocks of `block_size` positions."""

    pages: PagedKV | PagedLatents | IndexedKept
    block_size: int

    @property
    def keys_values(self) -> PagedKV | PagedLatents:
        """The pages of a head without an indexer."""
        assert not isinstance(self.pages, IndexedKept)
        return self.pages


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


class ChainedHead(Head, Protocol):
    """A head whose outputs the next one reads."""

    def prefilled(self, rows: PromptRows, batch: PrefillBatch, cache: HeadCache, phase: Phase) -> Tensor:
        """Return the hidden states [T, D] of all rows of the chunks of prompts, whose keys and values are in
        the cache afterwards."""


class HeadProposer:
    """Proposes tokens by a head, or by several, which are as many as it proposes at most. Each of the first
    heads, those of `chain`, makes what the next one reads; without a chain all read the target's hidden
    states. Pages are allocated by `begin`."""

    on_device = True
    bytes_per_request = 0

    def __init__(
        self, heads: Sequence[Head], setting: ProposerSetting, *, chain: Sequence[ChainedHead] = ()
    ) -> None:
        assert len(heads) <= setting.k
        assert len(chain) in (0, len(heads) - 1)
        deployment = setting.deployment
        first = heads[0]
        self.feature_layers = first.feature_layers
        self._heads = heads
        self._chain = chain
        self._setting = setting
        self._kv_format = DENSE_FORMATS[deployment.dtype]
        self.num_tokens_after = len(heads)
        self.num_rewritten_rows = setting.k + len(heads)
        self._ring = self.num_rewritten_rows + setting.k + 1
        """Positions in a ring: a step reads these rows of a request, and up to k more follow them."""
        self.weight_bytes = sum(each.weight_bytes for each in heads)
        ring_bytes = self._ring * first.arch.hidden_size * deployment.dtype.itemsize
        if len(heads) > 1:
            ring_bytes += self._ring * torch.int64.itemsize
        kv_bytes = sum(
            kv_bytes_per_token(each.arch, self._kv_format, num_positions=deployment.num_positions(each.arch))
            for each in heads
        )
        self.kv_bytes_per_token = kv_bytes + -(-ring_bytes // setting.block_size)

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Allocate pages and rings.

        Raises:
            UsageError: the head has fewer positions than the engine serves.
        """
        deployment = self._setting.deployment
        arch = self._heads[0].arch
        if arch.max_position < sizes.max_model_len:
            kind = self._heads[0].kind
            raise UsageError(
                f"the {kind} has {arch.max_position} positions and the engine serves sequences of "
                f"{sizes.max_model_len} tokens; set max_model_len to {arch.max_position} at most."
            )
        device = deployment.device
        self._kv_caches = [
            KVCache(
                each.arch,
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                kv_format=self._kv_format,
                device=device,
                num_positions=deployment.num_positions(each.arch),
            )
            for each in self._heads
        ]
        self._block_size = sizes.block_size
        self._caches = [_pages_of(each, sizes.block_size) for each in self._kv_caches]
        self._max_rows = max(deployment.max_decode_rows, SHORT_PROMPT_ROWS)
        self._rings_ND = torch.zeros(
            sizes.num_blocks * self._ring, arch.hidden_size, dtype=deployment.dtype, device=device
        )
        num_rings = len(self._rings_ND) if len(self._heads) > 1 else 0  # one head reads the last tokens alone
        self._token_rings_N = torch.zeros(num_rings, dtype=torch.int64, device=device)
        self._graphs: Graphs[Tensor] = Graphs(device, deployment.max_batch_size)
        max_rows = self._graphs.max_rows
        for each in self._heads:
            each.begin(target, max_model_len=sizes.max_model_len, max_rows=max_rows)
        shape = max_rows, self._setting.k, arch.vocab_size
        self._probs_SKV = (
            torch.zeros(shape, dtype=torch.float64, device=device) if self._setting.draws else None
        )

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self._heads for row in each.kernel_report()]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in the heads' pages. A request goes on after them,
        so nobody reads what the rings keep of them."""
        for each in self._kv_caches:
            each.copy_blocks(pairs)

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Write the heads' keys and values of the chunks, and to the rings what the first step reads."""
        assert features is not None
        phase: Phase = "decode" if short else "prefill"
        device = features.rows_TE.device
        fused_TD = self._heads[0].fused(features.rows_TE, phase)
        later = torch.tensor([token for each in batch.next_tokens for token in each], dtype=torch.int64)
        tokens_T = torch.cat((batch.tokens_T, sent(later, device)))
        hidden_TD = fused_TD
        for idx, (head, cache) in enumerate(zip(self._heads, self._caches, strict=True)):
            rows_T, read_T = (
                sent(each, device) for each in _rows_of(batch.query_lens, batch.next_tokens, idx + 1)
            )
            if idx < len(self._chain):  # rows whose tokens are yet to be chosen are written again
                all_T = torch.zeros_like(batch.tokens_T).index_copy_(0, rows_T, tokens_T[read_T])
                rows = PromptRows(all_T, hidden_TD, batch.positions_T, batch.slots_T)
                hidden_TD = self._chain[idx].prefilled(rows, batch, cache, phase)
            elif len(rows_T):
                where = batch.positions_T[rows_T], batch.slots_T[rows_T]
                head.store(PromptRows(tokens_T[read_T], hidden_TD[rows_T], *where), cache, phase)
        kept_L, owners_L = (sent(each, device) for each in _kept_rows(batch.query_lens, self._ring))
        kept_slots_L = self._ring_slots(
            batch.block_table_RB[owners_L], batch.positions_T[kept_L].unsqueeze(1)
        ).flatten()
        self._rings_ND[kept_slots_L] = fused_TD[kept_L]
        if len(self._heads) > 1:
            self._token_rings_N[kept_slots_L] = batch.tokens_T[kept_L]

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Write to the rings what the next step reads of the hidden states."""
        fused_TD = torch.cat(
            [self._heads[0].fused(part, "decode") for part in features.rows_TE.split(self._max_rows)]
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
        key = num_rows, state.num_blocks, plan
        tokens_RK = self._graphs.run(key, lambda: self._draft(state, num_rows, plan))
        return Drafts(tokens_RK[: len(generations)], probs_SKV=self._probs_SKV)

    def _draft(self, state: SpeculativeState, num_rows: int, plan: SamplingPlan) -> Tensor:
        """Run the k passes; return the proposed tokens [R, K]."""
        sampling = state.sampling.first(num_rows)
        lens_R = state.context_lens_S[:num_rows]
        tokens = list[Tensor]()
        if self._probs_SKV is not None:
            sampling = stream(sampling, PROPOSAL_STREAM)
        last = self._last_rows(state, num_rows)
        hidden_TD = last.hidden_TD
        num_heads = len(self._heads)
        for step in range(state.k):
            if step < num_heads:
                read_TD = hidden_TD if self._chain else last.hidden_TD
                last = last if step == 0 else last.shifted(tokens[-1])
                hidden_TD = self._hidden(state, step, last.tokens_RQ, read_TD, last.fed_R)
                hidden_RD = hidden_TD[last.indices]
            else:
                hidden_RD = self._hidden(state, -1, tokens[-1], hidden_RD, lens_R + step - num_heads)
            logits_RV = self._heads[min(step, num_heads - 1)].logits(hidden_RD)
            tokens.append(sample_rows(logits_RV, sampling, lens_R + step, plan).tokens_R.unsqueeze(1))
            if self._probs_SKV is not None and plan.draws:
                self._probs_SKV[:num_rows, step] = distribution(logits_RV, sampling, plan)
        return torch.cat(tokens, dim=1)

    def _last_rows(self, state: SpeculativeState, num_rows: int) -> "LastRows":
        """Return the last rows of each sequence for the first head."""
        lens_R = state.context_lens_S[:num_rows]
        table_RB = state.table_SB[:num_rows]
        q_len = self.num_rewritten_rows
        fed_R = (lens_R - 1).clamp(min=q_len)  # rows in the cache afterwards
        steps_Q = torch.arange(q_len, device=state.device)
        positions_RQ = (fed_R - q_len).unsqueeze(1) + steps_Q
        last_RN = state.last_SN[:num_rows]
        if len(self._heads) == 1:
            columns_RQ = ((fed_R - lens_R + 1).unsqueeze(1) + steps_Q).clamp(max=q_len - 1)
            tokens_RQ = last_RN.gather(1, columns_RQ)
        else:
            num_last = last_RN.shape[1]
            places_RN = (lens_R - num_last).unsqueeze(1) + torch.arange(num_last, device=state.device)
            slots_RN = self._ring_slots(table_RB, places_RN.clamp(min=0))
            slots_RN = torch.where(places_RN < 0, PADDING_BLOCK * self._ring, slots_RN)
            self._token_rings_N[slots_RN.flatten()] = last_RN.flatten()
            tokens_RQ = self._token_rings_N[self._ring_slots(table_RB, positions_RQ + 1)]
        hidden_TD = self._rings_ND[self._ring_slots(table_RB, positions_RQ).flatten()]
        return LastRows(tokens_RQ, hidden_TD, fed_R, lens_R - 2 - (fed_R - q_len))

    def _hidden(
        self,
        state: SpeculativeState,
        head_idx: int,
        tokens_RQ: Tensor,
        hidden_TD: Tensor,
        context_lens_R: Tensor,
    ) -> Tensor:
        """Return the hidden states [T, D] of rows of a head that read these tokens and hidden states at the
        ends of contexts of these lengths.
        """
        q_len = tokens_RQ.shape[1]
        cache = self._caches[head_idx]
        outputs = [
            self._heads[head_idx].hidden(fed, hidden_TD[fed.rows], cache, q_len=q_len)
            for fed in state.fed(tokens_RQ, context_lens_R, max_rows=self._max_rows)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _ring_slots(self, table_RB: Tensor, positions_RQ: Tensor) -> Tensor:
        """Return the slots [R, Q] of these positions in the rings."""
        blocks_RQ = table_RB.gather(1, positions_RQ // self._block_size)
        return blocks_RQ * self._ring + positions_RQ % self._ring


@dataclass(frozen=True)
class LastRows:
    """The last Q rows of each sequence: the tokens and the target's hidden states that they read, the rows in
    the cache after them, and which of the Q is the last row of a sequence. Rows after it are never read."""

    tokens_RQ: Tensor
    hidden_TD: Tensor
    fed_R: Tensor
    last_R: Tensor

    @property
    def indices(self) -> Tensor:
        """The last rows of the sequences among all T."""
        num_rows, q_len = self.tokens_RQ.shape
        return torch.arange(num_rows, device=self.last_R.device) * q_len + self.last_R

    def shifted(self, chosen_R1: Tensor) -> "LastRows":
        """Return the rows of the next head, which read one token further: the last row the token that was
        chosen."""
        tokens_RQ = torch.cat((self.tokens_RQ[:, 1:], chosen_R1), dim=1)
        return replace(self, tokens_RQ=tokens_RQ.scatter(1, self.last_R.unsqueeze(1), chosen_R1))


def _pages_of(cache: KVCache, block_size: int) -> HeadCache:
    pages = cache.layer(0)
    assert isinstance(pages, PagedKV | PagedLatents | IndexedKept)
    return HeadCache(pages, block_size)


def _rows_of(
    query_lens: Sequence[int], next_tokens: Sequence[tuple[int, ...]], distance: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of ragged chunks whose token at a distance after them is known, and the indices of
    these tokens, among the tokens of the chunks and then those after the chunks."""
    rows = list[int]()
    read = list[int]()
    first = 0
    after = sum(query_lens)
    for queries, later in zip(query_lens, next_tokens, strict=True):
        known = [*range(first, first + queries), *range(after, after + len(later))]
        found = known[distance : distance + queries]
        rows += range(first, first + len(found))
        read += found
        first += queries
        after += len(later)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(read, dtype=torch.int64)


def _kept_rows(query_lens: Sequence[int], ring: int) -> tuple[Tensor, Tensor]:
    """Return the last rows of each of ragged chunks, which the rings keep, and the sequences of these."""
    kept = list[int]()
    owners = list[int]()
    first = 0
    for idx, queries in enumerate(query_lens):
        own = range(first, first + queries)[-ring:]
        kept += own
        owners += [idx] * len(own)
        first += queries
    return torch.tensor(kept, dtype=torch.int64), torch.tensor(owners, dtype=torch.int64)
