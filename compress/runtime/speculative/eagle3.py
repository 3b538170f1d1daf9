"""An EAGLE-3 head (`models/eagle3.py`) writes k tokens from the model's own hidden states, and the model reads them at once.

Row t of the head is made of the hidden state of token t and the embedding of token t + 1, so a chunk of a prompt that feeds tokens s..e
gives the rows s - 1..e - 1. Its keys and values lie in pages of its own, under the block numbers of the model's cache.

Fused hidden states f are kept in rings: those of a request's last positions, under the number of its first block, which is nobody else's
while it runs. A verification writes up to k + 1 of them, those of rejected tokens included, which are overwritten when their positions come
again. A step first feeds the last k + 1 rows: what is new among them had keys and values of the head's own hidden states, if any. Then
it feeds what it chose, with the hidden state it was chosen from, k - 1 times. Of a shorter sequence it feeds some that are yet to come,
at which nothing looks. So all it needs to know of a sequence is its length, its last tokens and its blocks.

Logits are those of the target's whole vocabulary, minus infinity outside the head's, so that it draws with the model's noise of a token
where the rule is "coupled", and hands on whole distributions where it is "rejection". On CUDA all k passes are one graph.

Shapes: R requests, S rows of the state, K tokens proposed, Q tokens of a request that are fed, T rows, L of them that are kept, N slots of
the rings, D hidden, V vocabulary, W the head's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.kernels.problem import Phase
from compress.models.eagle3 import Eagle3Head
from compress.models.weights import dense
from compress.runtime.deployment import SHORT_PROMPT_ROWS, Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.loader import LayerWeights, fuse, fuse_groups
from compress.runtime.model_runner import Features, PrefillBatch
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.graphs import Graphs
from compress.runtime.speculative.proposer import Drafts, Pages, Setting
from compress.runtime.speculative.state import RunningRow, SpeculativeState


@PROPOSERS.register("eagle3")
@dataclass(frozen=True)
class Eagle3:
    """The head, made for the model that it proposes for."""

    head: Eagle3Head

    def build(self, setting: Setting) -> "Eagle3Proposer":
        """Raises UsageError where the head is another model's."""
        facts = self.head.facts
        target = setting.arch
        found = (facts.arch.vocab_size, facts.arch.hidden_size)
        wanted = (target.vocab_size, target.hidden_size)
        if found != wanted or facts.layer_ids[-1] > target.num_layers:
            raise UsageError(
                f"the EAGLE-3 head was made for a model of {found[0]} tokens and hidden size {found[1]}, and reads it after layer "
                f"{facts.layer_ids[-1]}; this one has {wanted[0]} tokens, hidden size {wanted[1]} and {target.num_layers} layers."
            )
        return Eagle3Proposer(self.head, setting)


@dataclass(frozen=True)
class Eagle3Weights:
    """The head as it runs. `layer.attn_norm` is the norm of the embedding."""

    fc: FusedLinear
    hidden_norm: Tensor
    layer: LayerWeights
    norm: Tensor
    head: FusedLinear

    @property
    def weight_bytes(self) -> int:
        return sum(each.weight_bytes for each in (self.fc, *self.layer.fused_linears, self.head))


def load_eagle3(head: Eagle3Head, deployment: Deployment) -> Eagle3Weights:
    """Raises EnvironmentUnfit where no kernel supports a linear."""
    arch = head.facts.arch
    prefix = "layers.0."
    own = {
        name.removeprefix(prefix): weight for name, weight in head.weights.items() if name.startswith(prefix)
    }

    def vector(name: str) -> Tensor:
        return dense(head.weights[name]).to(device=deployment.device, dtype=deployment.dtype)

    layer = LayerWeights(
        shape=arch.layers[0],
        attn_norm=vector(f"{prefix}embed_norm.weight"),
        qk_norm=None,
        ffn_norm=vector(f"{prefix}ffn_norm.weight"),
        **fuse_groups(arch, arch.layers[0], own, deployment),
        kv_scales=None,
    )
    outer = {name: fuse((name,), head.weights, deployment) for name in ("fc", "head")}
    return Eagle3Weights(
        outer["fc"], vector(f"{prefix}hidden_norm.weight"), layer, vector("norm.weight"), outer["head"]
    )


class Eagle3Proposer:
    """Loaded when made; its pages follow with `begin`."""

    on_device = True

    def __init__(self, head: Eagle3Head, setting: Setting) -> None:
        deployment = setting.deployment
        arch = head.facts.arch
        self.feature_layers = head.facts.layer_ids
        self._head = head
        self._setting = setting
        self._weights = load_eagle3(head, deployment)
        self._kv_format = DENSE_FORMATS[deployment.dtype]
        self._ring = 2 * (setting.k + 1)
        """A step reads the last k + 1 positions, and up to k more were written behind them."""
        self.weight_bytes = self._weights.weight_bytes
        ring_bytes = self._ring * arch.hidden_size * deployment.dtype.itemsize
        self.kv_bytes_per_token = kv_bytes_per_token(arch, self._kv_format) + -(
            -ring_bytes // setting.block_size
        )

    def begin(self, pages: Pages, embed_VD: Tensor) -> None:
        """Raises UsageError where the head has fewer positions than the engine serves."""
        deployment = self._setting.deployment
        arch = self._head.facts.arch
        own = self._head.embed_VD
        if arch.max_position < pages.max_model_len:
            raise UsageError(
                f"the EAGLE-3 head has {arch.max_position} positions and the engine serves sequences of {pages.max_model_len} tokens; "
                f"set max_model_len to {arch.max_position} at most."
            )
        device = deployment.device
        dtype = deployment.dtype
        self._block_size = pages.block_size
        self._embed_VD = embed_VD if own is None else own.to(device=device, dtype=dtype)
        cache = KVCache(
            arch,
            num_blocks=pages.num_blocks,
            block_size=pages.block_size,
            kv_format=self._kv_format,
            device=device,
        )
        self._kv = cache.layer(0)
        self._layers = LayerRunner(arch, deployment, self._kv_format, max_model_len=pages.max_model_len)
        self._max_rows = max(deployment.max_decode_rows, SHORT_PROMPT_ROWS)
        self._rings_ND = torch.zeros(
            pages.num_blocks * self._ring, arch.hidden_size, dtype=dtype, device=device
        )
        self._graphs: Graphs[Tensor] = Graphs(device, deployment.max_batch_size)
        self._vocabulary_W = self._head.vocabulary_W.to(device)
        max_rows = self._graphs.max_rows
        k = self._setting.k
        self._logits_SV = torch.full(
            (max_rows, arch.vocab_size), float("-inf"), dtype=torch.float32, device=device
        )
        self._probs_SKV = (
            torch.zeros(max_rows, k, arch.vocab_size, dtype=torch.float64, device=device)
            if self._setting.draws
            else None
        )

    def kernel_report(self) -> list[dict[str, Any]]:
        """As of a model with one layer, and `fc`."""
        weights = self._weights
        rows = [row for each in weights.layer.fused_linears for row in each.report(0)]
        return [*weights.fc.report(None), *rows, *weights.head.report(None), *self._layers.kernel_report()]

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Writes the head's keys and values of a chunk, and what the next chunk or the first step reads of it."""
        assert features is not None
        phase: Phase = "decode" if short else "prefill"
        starts = [
            length - queries for queries, length in zip(batch.query_lens, batch.context_lens, strict=True)
        ]
        rows_T, sources_T, kept_L, owners_L = (
            each.to(features.rows_TE.device) for each in _chunk_rows(starts, batch.query_lens, self._ring)
        )
        fused_TD = self._weights.fc(features.rows_TE, phase)
        before_R1 = torch.tensor(starts, device=fused_TD.device).sub(1).clamp(min=0).unsqueeze(1)
        before_RD = self._rings_ND[self._ring_slots(batch.block_table_RB, before_R1).flatten()]
        blocks_R1 = batch.block_table_RB.gather(1, before_R1 // self._block_size)
        before_slots_R = (blocks_R1 * self._block_size + before_R1 % self._block_size).flatten()
        if len(rows_T):
            hidden_TD = torch.cat((before_RD, fused_TD))[sources_T]
            positions_T = torch.cat((before_R1.flatten(), batch.positions_T))[sources_T]
            slots_T = torch.cat((before_slots_R, batch.slots_T))[sources_T]
            qkv_TF, _ = self._qkv(batch.tokens_T[rows_T], hidden_TD, phase)
            self._layers.queries(self._weights.layer, qkv_TF, positions_T, slots_T, self._kv)
        kept_slots_L1 = self._ring_slots(
            batch.block_table_RB[owners_L], batch.positions_T[kept_L].unsqueeze(1)
        )
        self._rings_ND[kept_slots_L1.flatten()] = fused_TD[kept_L]

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Keeps what the next step reads."""
        fused_TD = torch.cat(
            [self._weights.fc(part, "decode") for part in features.rows_TE.split(self._max_rows)]
        )
        num_rows = len(fused_TD) // q_len
        positions_RQ = state.context_lens_S[:num_rows].unsqueeze(1) + torch.arange(
            -1, q_len - 1, device=state.device
        )
        self._rings_ND[self._ring_slots(state.table_SB[:num_rows], positions_RQ).flatten()] = fused_TD

    def propose(self, rows: Sequence[RunningRow], state: SpeculativeState) -> Drafts:
        """k tokens for every row, whatever its limit."""
        size = self._graphs.num_rows(len(rows))
        plan = replace(state.plan, logprobs=False)
        tokens_RK = self._graphs.run((size, plan), lambda: self._draft(state, size, plan))
        return Drafts(tokens_RK[: len(rows)], probs_SKV=self._probs_SKV)

    def _draft(self, state: SpeculativeState, num_rows: int, plan: SamplingPlan) -> Tensor:
        sampling = state.sampling.first(num_rows)
        lens_R = state.context_lens_S[:num_rows]
        tokens = []
        if self._probs_SKV is not None:
            sampling = stream(sampling, PROPOSAL_STREAM)
        hidden_RD = self._read(state, num_rows)
        for step in range(state.k):
            logits_RV = self._logits(hidden_RD)
            tokens_R1 = sample_rows(logits_RV, sampling, lens_R + step, plan).tokens_R.unsqueeze(1)
            tokens.append(tokens_R1)
            if self._probs_SKV is not None and plan.draws:
                self._probs_SKV[:num_rows, step] = distribution(logits_RV, sampling, plan)
            if step < state.k - 1:
                hidden_RD = self._hidden(state, tokens_R1, hidden_RD, lens_R + step)
        return torch.cat(tokens, dim=1)

    def _read(self, state: SpeculativeState, num_rows: int) -> Tensor:
        """[R, D] of each sequence's last row, after the last k + 1 rows were fed: rows t of tokens t + 1."""
        lens_R = state.context_lens_S[:num_rows]
        q_len = state.k + 1
        fed_R = (lens_R - 1).clamp(min=q_len)  # rows in the cache then
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
        """g [T, D] of rows at the end of contexts of this length, made of these tokens and hidden states."""
        q_len = tokens_RQ.shape[1]
        outputs = []
        layer = self._weights.layer
        for fed in state.fed(tokens_RQ, context_lens_R, max_rows=self._max_rows):
            qkv_TF, residual_TD = self._qkv(fed.tokens_T, hidden_TD[fed.rows], "decode")
            attend = self._layers.attend_decode(fed.table_RB, fed.context_lens_R, q_len=q_len)
            where = fed.positions_T, fed.slots_T, self._kv
            outputs.append(self._layers.after_qkv(layer, qkv_TF, residual_TD, *where, attend, "decode"))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _qkv(self, tokens_T: Tensor, hidden_TD: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """(q, k and v side by side, what the layer adds to)."""
        weights = self._weights
        norm = self._layers.norm
        normed_TD = norm(hidden_TD, weights.hidden_norm)
        pair = torch.cat(
            (norm(F.embedding(tokens_T, self._embed_VD), weights.layer.attn_norm), normed_TD), dim=1
        )
        return weights.layer.qkv(
            pair, phase
        ), normed_TD if self._head.facts.norm_before_residual else hidden_TD

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, V]; overwritten by the next call."""
        head = self._weights.head
        logits_RV = self._logits_SV[: len(hidden_RD)]
        normed = self._layers.normed(hidden_RD, self._weights.norm, head, "decode")
        return logits_RV.index_copy_(1, self._vocabulary_W, head(normed, "decode", out_dtype=torch.float32))

    def _ring_slots(self, table_RB: Tensor, positions_RQ: Tensor) -> Tensor:
        """[R, Q]."""
        return table_RB[:, :1] * self._ring + positions_RQ % self._ring


def _chunk_rows(
    starts: Sequence[int], query_lens: Sequence[int], ring: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which tokens of ragged chunks give a row of the head: all but the first of a sequence; and which hidden state goes with each, counted
    from those before the chunks, [R], and on through those of the chunks. Then the last tokens of each chunk, and whose they are."""
    rows = list[int]()
    sources = list[int]()
    kept = list[int]()
    owners = list[int]()
    first = 0
    for idx, (start, queries) in enumerate(zip(starts, query_lens, strict=True)):
        chunk = range(first, first + queries)
        rows += chunk if start else chunk[1:]
        sources += [*([idx] if start else []), *(len(starts) + row for row in chunk[:-1])]
        kept += chunk[-ring:]
        owners += [idx] * len(chunk[-ring:])
        first = chunk.stop
    rows_T, sources_T, kept_L, owners_L = (
        torch.tensor(each, dtype=torch.int64) for each in (rows, sources, kept, owners)
    )
    return rows_T, sources_T, kept_L, owners_L
