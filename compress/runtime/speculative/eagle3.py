"""An EAGLE-3 head (arXiv 2503.01840; `models/eagle3.py`): it proposes k tokens from the target model's own
hidden states.

Row t of the head reads the hidden state of token t and the embedding of token t + 1, so a chunk of a prompt
that feeds tokens s..e to the target gives the rows s - 1..e - 1. The head's keys and values have pages of
their own, with the block numbers of the target's cache.

Fused hidden states f of the last positions of a request are kept in a ring, at the number of the request's
first block, which no other request has while it runs. A verification writes up to k + 1 of them. Those of
rejected tokens are overwritten when their positions come again. A step first feeds the last k + 1 rows: the
new ones among them replace keys and values that the head computed from its own hidden states. Then it feeds
its own choice k - 1 times, with the hidden state that the choice was made from. If a sequence is shorter than
k + 1, it also feeds positions after its end, whose results are never read. So all that a step needs of a
request are its length, its last tokens and its blocks.

Logits span the target's whole vocabulary, with minus infinity outside the head's. So with the rule "coupled"
the head draws with the target's noise of each token, and with "rejection" it returns whole distributions. On
CUDA all k passes are one graph.

Shapes: R requests, S rows of the state, K tokens proposed, Q tokens of a request that are fed, T rows, L of
them that are kept, N slots of the rings, D hidden, V vocabulary, W vocabulary of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS, PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.eagle3 import Eagle3Head, check_one_stream
from compress.models.weights import dense
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.deployment import SHORT_PROMPT_ROWS, Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from compress.runtime.layer_attention import Projected
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.loader import LayerWeights, fuse_groups
from compress.runtime.row_norms import row_norm, stream_scale
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState
from compress.runtime.stream import Reader, Stream


@PROPOSERS.register("eagle3")
@dataclass(frozen=True)
class Eagle3:
    """Options of an EAGLE-3 head: its weights, trained for the target model."""

    head: Eagle3Head

    def build(self, setting: ProposerSetting) -> "Eagle3Proposer":
        """Load the head.

        Raises:
            UsageError: the head was made for a model of another vocabulary, hidden size or depth, or the
                residual of the model is several streams.
        """
        facts = self.head.facts
        target = setting.arch
        check_one_stream(target)
        found = (facts.arch.vocab_size, facts.arch.hidden_size)
        wanted = (target.vocab_size, target.hidden_size)
        if found != wanted or facts.layer_ids[-1] > target.num_layers:
            raise UsageError(
                f"the EAGLE-3 head was made for a model of {found[0]} tokens and hidden size {found[1]}, "
                f"and reads it after layer {facts.layer_ids[-1]}; this one has {wanted[0]} tokens, hidden "
                f"size {wanted[1]} and {target.num_layers} layers."
            )
        return Eagle3Proposer(self.head, setting)


@dataclass(frozen=True)
class Eagle3Weights:
    """The weights of a head in the layouts of its kernels. `layer.attn_norm` is the norm of the embedding."""

    fc: FusedLinear
    hidden_norm: RowNorm
    layer: LayerWeights
    norm: RowNorm
    head: FusedLinear

    @property
    def weight_bytes(self) -> int:
        """Bytes that one pass of the head reads."""
        return sum(each.weight_bytes for each in (self.fc, *self.layer.fused_linears, self.head))


def load_eagle3(head: Eagle3Head, deployment: Deployment, *, target_scale: float = 1.0) -> Eagle3Weights:
    """Fuse the linears of a head and repack its weights for a deployment. The target's embedding table holds
    embeddings divided by `target_scale`.

    Raises:
        EnvironmentUnfit: no kernel supports a linear.
    """
    arch = head.facts.arch
    prefix = "layers.0."
    own = {
        name.removeprefix(prefix): weight for name, weight in head.weights.items() if name.startswith(prefix)
    }

    def norm(name: str, eps: float | None = None) -> RowNorm:
        weight = dense(head.weights[f"{name}.weight"]).to(device=deployment.device, dtype=deployment.dtype)
        return row_norm(arch, weight, eps=eps)

    groups = fuse_groups(arch, arch.layers[0], own, deployment)
    layer = LayerWeights(
        shape=arch.layers[0],
        attn_norm=norm(
            f"{prefix}embed_norm", None if head.embed_VD is not None else arch.norm_eps / target_scale**2
        ),
        qk_norm=None,
        ffn_norm=norm(f"{prefix}ffn_norm"),
        qkv=groups.qkv,
        o=groups.o,
        gate_up=groups.gate_up,
        down=groups.down,
        kv_scales=None,
    )
    outer = {name: fuse((name,), head.weights, deployment) for name in ("fc", "head")}
    return Eagle3Weights(outer["fc"], norm(f"{prefix}hidden_norm"), layer, norm("norm"), outer["head"])


class Eagle3Proposer:
    """A loaded EAGLE-3 head. Its pages are allocated by `begin`."""

    on_device = True
    bytes_per_request = 0

    def __init__(self, head: Eagle3Head, setting: ProposerSetting) -> None:
        deployment = setting.deployment
        arch = head.facts.arch
        self.feature_layers = head.facts.layer_ids
        self._head = head
        self._setting = setting
        self._weights = load_eagle3(head, deployment, target_scale=stream_scale(setting.arch))
        self._kv_format = DENSE_FORMATS[deployment.dtype]
        self._ring = 2 * (setting.k + 1)
        """Positions in the ring of a request: a step reads the last k + 1, and up to k more follow them."""
        self.weight_bytes = self._weights.weight_bytes
        ring_bytes = self._ring * arch.hidden_size * deployment.dtype.itemsize
        self.kv_bytes_per_token = kv_bytes_per_token(arch, self._kv_format) + -(
            -ring_bytes // setting.block_size
        )

    def begin(self, sizes: CacheSizes, embed_VD: Tensor) -> None:
        """Allocate pages, rings and logits.

        Raises:
            UsageError: the head has fewer positions than the engine serves.
        """
        deployment = self._setting.deployment
        arch = self._head.facts.arch
        own = self._head.embed_VD
        if arch.max_position < sizes.max_model_len:
            raise UsageError(
                f"the EAGLE-3 head has {arch.max_position} positions and the engine serves sequences of "
                f"{sizes.max_model_len} tokens; set max_model_len to {arch.max_position} at most."
            )
        device = deployment.device
        dtype = deployment.dtype
        self._block_size = sizes.block_size
        self._embed_VD = embed_VD if own is None else own.to(device=device, dtype=dtype)
        cache = KVCache(
            arch,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            kv_format=self._kv_format,
            device=device,
        )
        pages = cache.layer(0)
        assert isinstance(pages, (PagedKV, PagedLatents))
        self._kv = pages
        self._layers = LayerRunner(arch, deployment, self._kv_format, max_model_len=sizes.max_model_len)
        self._max_rows = max(deployment.max_decode_rows, SHORT_PROMPT_ROWS)
        self._rings_ND = torch.zeros(
            sizes.num_blocks * self._ring, arch.hidden_size, dtype=dtype, device=device
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
        """Return rows of `Engine.kernel_report`: of `fc`, of the layer, of the head and of the other ops."""
        weights = self._weights
        rows = [row for each in weights.layer.fused_linears for row in each.report(0)]
        return [*weights.fc.report(None), *rows, *weights.head.report(None), *self._layers.kernel_report()]

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Write the head's keys and values of the chunks, and to the rings what the next chunk or the first
        step reads.
        """
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
            projected = Projected(qkv_TF, positions_T, slots_T, self._kv)
            self._layers.attention.queries(self._weights.layer, projected)
        kept_slots_L1 = self._ring_slots(
            batch.block_table_RB[owners_L], batch.positions_T[kept_L].unsqueeze(1)
        )
        self._rings_ND[kept_slots_L1.flatten()] = fused_TD[kept_L]

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Write to the rings the fused hidden states that the next step reads."""
        fused_TD = torch.cat(
            [self._weights.fc(part, "decode") for part in features.rows_TE.split(self._max_rows)]
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
            logits_RV = self._logits(hidden_RD)
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
        """Return g [T, D] of rows that read these tokens and hidden states at the ends of contexts of these
        lengths.
        """
        q_len = tokens_RQ.shape[1]
        outputs = []
        layer = self._weights.layer
        for fed in state.fed(tokens_RQ, context_lens_R, max_rows=self._max_rows):
            qkv_TF, residual_TD = self._qkv(fed.tokens_T, hidden_TD[fed.rows], "decode")
            attend = self._layers.attention.decode(
                fed.table_RB, fed.context_lens_R, q_len=q_len, block_size=self._kv.block_size
            )
            projected = Projected(qkv_TF, fed.positions_T, fed.slots_T, self._kv)
            after = self._layers.after_qkv(layer, projected, residual_TD, attend, "decode")
            outputs.append(after.x_TD)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _qkv(self, tokens_T: Tensor, hidden_TD: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Return q, k and v, concatenated, and the residual that the layer adds to."""
        weights = self._weights
        norm = self._layers.norm
        embed_norm = weights.layer.attn_norm
        assert embed_norm is not None
        normed_TD = norm(hidden_TD, weights.hidden_norm)
        pair = torch.cat((norm(F.embedding(tokens_T, self._embed_VD), embed_norm), normed_TD), dim=1)
        residual_TD = normed_TD if self._head.facts.norm_before_residual else hidden_TD
        return weights.layer.qkv(pair, phase), residual_TD

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V] of the target's vocabulary, which the next call overwrites."""
        head = self._weights.head
        logits_RV = self._logits_SV[: len(hidden_RD)]
        normed = self._layers.rows(Stream(hidden_RD), Reader(self._weights.norm, head), "decode")
        return logits_RV.index_copy_(1, self._vocabulary_W, head(normed, "decode", out_dtype=torch.float32))

    def _ring_slots(self, table_RB: Tensor, positions_RQ: Tensor) -> Tensor:
        """Return the slots [R, Q] of these positions in the rings."""
        return table_RB[:, :1] * self._ring + positions_RQ % self._ring


def _chunk_rows(
    starts: Sequence[int], query_lens: Sequence[int], ring: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices that prefill reads and keeps, for ragged chunks that begin at `starts`.

    `rows_T` are the tokens that give a row of the head: all but the first of a sequence. `sources_T` are
    their hidden states, among R of the positions before the chunks and then those of the chunks. `kept_L` are
    the last tokens of each chunk, which the rings keep, and `owners_L` their sequences.
    """
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
