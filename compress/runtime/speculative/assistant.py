"""An assistant (`models/assistant.py`) in serving: it proposes k tokens from the target's last hidden state,
and its layers read the target's own pages.

It writes no keys and values, so it needs no prefill and no pages. Of a sequence it keeps the target's normed
hidden states of the last k + 1 positions, in a ring of each block. A verification writes those of the last
token and of all proposals; a step of drafting reads that of the token before the last, from which the last
one was chosen. Those of rejected tokens are overwritten when their positions come again. The last token of a
prompt is always computed, so a prefix that is found in the cache needs no hidden states.

All k passes of a step have the position of the last token, and read the keys and values of the tokens before
it. The pages may have any format of a KV cache, also one with scales or transformed heads. With the rule
"coupled" an assistant draws with the target's noise of each token, and with "rejection" it returns whole
distributions. On CUDA all k passes are one graph.

Shapes: R requests, S rows of the state, K tokens proposed, T rows, N slots of the rings, D hidden size of the
target, E that of the assistant, V vocabulary, B blocks of the longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.rows import RowNorm
from compress.kernels.step.host_memory import sent
from compress.models.assistant import (
    CENTROIDS,
    HEAD,
    NORM,
    POST,
    PRE,
    Assistant,
    target_layers,
)
from compress.models.weights import dense
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.deployment import SHORT_PROMPT_ROWS, Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.layer_runner import LayerRunner
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.loader import load_layer
from compress.runtime.model_runner import ModelRunner
from compress.runtime.ordered_logits import ordered_logits
from compress.runtime.row_norms import row_norm
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState
from compress.runtime.stream import Stream, mixer_reader


@PROPOSERS.register("assistant")
@dataclass(frozen=True)
class AssistantModel:
    """Options of an assistant: its weights, trained for the target model."""

    assistant: Assistant

    def build(self, setting: ProposerSetting) -> "AssistantProposer":
        """Load the assistant.

        Raises:
            UsageError: it was made for another model.
        """
        return AssistantProposer(self.assistant, setting)


@dataclass(frozen=True)
class AssistantWeights:
    """The weights of an assistant in the layouts of its kernels. With ordered embeddings `centroids` score
    the clusters, and the rows of chosen tokens are gathered from `head_VE`; without them `head` computes all
    logits."""

    pre: FusedLinear
    layers: tuple[LayerWeights, ...]
    norm: RowNorm
    post: FusedLinear
    head: FusedLinear | None = None
    centroids: FusedLinear | None = None
    head_VE: Tensor | None = None
    tokens_CN: Tensor | None = None

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """The linears outside of the layers."""
        return tuple(each for each in (self.pre, self.post, self.head, self.centroids) if each is not None)


def load_assistant(assistant: Assistant, deployment: Deployment) -> AssistantWeights:
    """Load the weights of an assistant, and choose the kernels of its linears.

    Raises:
        EnvironmentUnfit: no kernel supports a linear.
    """

    def one(name: str) -> FusedLinear:
        return fuse((name,), assistant.weights, deployment)

    facts = assistant.facts
    norm = deployment.placed(dense(assistant.weights[f"{NORM}.weight"]))
    ordered = assistant.tokens_CN is not None
    return AssistantWeights(
        pre=one(PRE),
        layers=tuple(load_layer(assistant, idx, deployment) for idx in facts.own_layers),
        norm=row_norm(facts.arch, norm, NORM),
        post=one(POST),
        head=None if ordered else one(HEAD),
        centroids=one(CENTROIDS) if ordered else None,
        head_VE=deployment.placed(dense(assistant.weights[f"{HEAD}.weight"])) if ordered else None,
        tokens_CN=None if assistant.tokens_CN is None else assistant.tokens_CN.to(deployment.device),
    )


class AssistantProposer:
    """A loaded assistant. Its rings are allocated by `begin`."""

    bytes_per_request = 0
    num_rewritten_rows = 0
    num_tokens_after = 0
    on_device = True

    def __init__(self, assistant: Assistant, setting: ProposerSetting) -> None:
        facts = assistant.facts
        self._target_layers = target_layers(facts, setting.arch)
        self._facts = facts
        self._arch = facts.arch
        self._setting = setting
        self._weights = load_assistant(assistant, setting.deployment)
        self.feature_layers: tuple[int, ...] = (setting.arch.num_layers,)
        self._ring = setting.k + 1
        """Positions in a ring: as many as a verification writes."""
        ring_bytes = self._ring * setting.arch.hidden_size * setting.deployment.dtype.itemsize
        self.kv_bytes_per_token = -(-ring_bytes // setting.block_size)
        self.weight_bytes = self._bytes_read()

    def _bytes_read(self) -> int:
        """Return the bytes that one pass of one row reads."""
        own = sum(each.weight_bytes for each in self._weights.linears)
        own += sum(each.bytes_read() for each in self._weights.layers)
        if self._facts.ordered is None:
            return own
        chosen = self._facts.ordered.top_k * (self._arch.vocab_size // self._facts.ordered.num_centroids)
        return own + chosen * self._arch.hidden_size * self._setting.deployment.dtype.itemsize

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Select the kernels of the layers for the target's pages, and allocate rings.

        Raises:
            UsageError: the assistant has fewer positions than the engine serves.
        """
        if self._arch.max_position < sizes.max_model_len:
            raise UsageError(
                f"the assistant has {self._arch.max_position} positions and the engine serves sequences of "
                f"{sizes.max_model_len} tokens; set max_model_len to {self._arch.max_position} at most."
            )
        deployment = self._setting.deployment
        self._target = target
        self._block_size = sizes.block_size
        self._last_position = sizes.max_model_len
        pages = [target.pages(idx) for idx in self._target_layers]
        assert all(isinstance(each, PagedKV) for each in pages)
        shapes = self._arch.layers[self._facts.num_read :]
        self._pages = [pages[shape.kv_source] for shape in shapes if shape.kv_source is not None]
        self._layers = LayerRunner(
            self._arch, deployment, target.kv_format, max_model_len=sizes.max_model_len
        )
        self._readers = [*(mixer_reader(layer) for layer in self._weights.layers[1:]), None]
        self._max_rows = max(deployment.max_decode_rows, SHORT_PROMPT_ROWS)
        self._rings_ND = torch.zeros(
            sizes.num_blocks * self._ring,
            self._setting.arch.hidden_size,
            dtype=deployment.dtype,
            device=deployment.device,
        )
        self._graphs: Graphs[Tensor] = Graphs(deployment.device, deployment.max_batch_size)
        shape = self._graphs.max_rows, self._setting.k, self._arch.vocab_size
        self._probs_SKV = (
            torch.zeros(shape, dtype=torch.float64, device=deployment.device) if self._setting.draws else None
        )

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`: of the linears outside of the layers, of the layers, and of
        the other ops."""
        rows = [row for each in self._weights.linears for row in each.report(None)]
        rows += [row for idx, layer in enumerate(self._weights.layers) for row in layer.report(idx)]
        return rows + self._layers.kernel_report()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy nothing. Prompts are not shared, because the rings have room of their own in each block
        (`CachePlan.blocks_hold_all`), so only first blocks of sequences with states are copied: a request
        that goes on from one computes tokens after it, and nobody reads what the rings keep of the block."""

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Keep the hidden states of the last rows of the chunks."""
        assert features is not None
        device = features.rows_TE.device
        ends = torch.tensor(batch.query_lens).cumsum(0) - 1
        last_R = sent(ends, device)
        slots_R = self._ring_slots(batch.block_table_RB, batch.positions_T[last_R])
        self._rings_ND[slots_R] = self._target.normed(features.rows_TE[last_R])

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Keep the hidden states of a verification step, also of proposals that turn out to be rejected."""
        num_rows = len(features.rows_TE) // q_len
        positions_RQ = state.context_lens_S[:num_rows].unsqueeze(1) + torch.arange(
            -1, q_len - 1, device=state.device
        )
        table_RB = state.table_SB[:num_rows]
        slots_T = self._ring_slots(table_RB, positions_RQ).flatten()
        self._rings_ND[slots_T] = self._target.normed(features.rows_TE)

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
        table_RB = state.table_SB[:num_rows]
        if self._probs_SKV is not None:
            sampling = stream(sampling, PROPOSAL_STREAM)
        hidden_RD = self._rings_ND[self._ring_slots(table_RB, lens_R - 2)]
        tokens_R = state.last_SN[:num_rows, -1]
        tokens = list[Tensor]()
        for step in range(state.k):
            logits_RV, hidden_RD = self._pass(tokens_R, hidden_RD, lens_R, table_RB)
            tokens_R = sample_rows(logits_RV, sampling, lens_R + step, plan).tokens_R
            if self._probs_SKV is not None and plan.draws:
                self._probs_SKV[:num_rows, step] = distribution(logits_RV, sampling, plan)
            tokens.append(tokens_R)
        return torch.stack(tokens, dim=1)

    def _pass(
        self, tokens_R: Tensor, hidden_RD: Tensor, lens_R: Tensor, table_RB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return float32 logits [R, V] and the hidden states [R, D] that the next pass reads, of sequences of
        `lens_R` tokens. They end with `tokens_R`, or these are proposals that follow. No more rows run at
        once than the decode kernels were selected for."""
        parts = zip(
            *(each.split(self._max_rows) for each in (tokens_R, hidden_RD, lens_R, table_RB)), strict=True
        )
        outputs = [self._part(*part) for part in parts]
        if len(outputs) == 1:
            return outputs[0]
        logits, hidden = zip(*outputs, strict=True)
        return torch.cat(logits), torch.cat(hidden)

    def _part(
        self, tokens_R: Tensor, hidden_RD: Tensor, lens_R: Tensor, table_RB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `_pass` returns, of rows that run at once."""
        weights = self._weights
        embedded_RD = F.embedding(tokens_R, self._target.stream_embedding)
        stream = Stream(weights.pre(torch.cat((embedded_RD, hidden_RD), dim=1), "decode"))
        attend = self._layers.attention.decode(table_RB, lens_R - 1, q_len=1, block_size=self._block_size)
        positions_R = (lens_R - 1).clamp(max=self._last_position)
        nowhere_R = torch.zeros_like(positions_R)  # its layers write no keys and values
        for layer, pages, reader in zip(weights.layers, self._pages, self._readers, strict=True):
            stream = self._layers.layer(
                layer, stream, positions_R, nowhere_R, pages, attend, "decode", reader
            )
        normed_RE = self._layers.ops.norm(stream.x_TD, weights.norm)
        return self._logits(normed_RE), weights.post(normed_RE, "decode")

    def _logits(self, normed_RE: Tensor) -> Tensor:
        """Return float32 logits [R, V], with ordered embeddings of tokens in chosen clusters alone."""
        weights = self._weights
        if weights.centroids is None or weights.head_VE is None or weights.tokens_CN is None:
            assert weights.head is not None
            return weights.head(normed_RE, "decode", out_dtype=torch.float32)
        assert self._facts.ordered is not None
        scores_RC = weights.centroids(normed_RE, "decode", out_dtype=torch.float32)
        return ordered_logits(
            normed_RE, scores_RC, weights.head_VE, weights.tokens_CN, self._facts.ordered.top_k
        )

    def _ring_slots(self, table_RB: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of positions [R] or [R, Q] in the rings."""
        positions_RQ = positions.view(len(table_RB), -1)
        blocks_RQ = table_RB.gather(1, positions_RQ // self._block_size)
        return (blocks_RQ * self._ring + positions_RQ % self._ring).view(positions.shape)
