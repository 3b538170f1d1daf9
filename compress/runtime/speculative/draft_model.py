"""A draft model: a smaller model of the same vocabulary proposes k tokens, one after the other.

The draft model has its own weights, and its own pages with the block numbers of the target model's cache. It
prefills every chunk of a prompt that the target model prefills. In a step it is first fed the last two tokens
of a request: the last is new to it, and so is the one before it if all k proposals of the last step were kept
(otherwise its keys and values are written again, the same but for rounding). Then it is fed its own choice,
k - 1 times. So the first step after a prompt writes the row of its last token again, and a block that ends
with this token is not cached before the request ends.

With the rule "coupled" it draws with the target model's own noise, and so agrees more often than by chance.
With "rejection" it draws with noise of its own and returns the distributions. On CUDA all k passes are one
graph.

Shapes: R rows, S rows of the state, K tokens proposed, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.operands.paged import DENSE_FORMATS
from compress.models.weights import WeightSource
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token, slot_bytes
from compress.runtime.loader import load_model
from compress.runtime.model_runner import ModelRunner
from compress.runtime.sampler import SamplingPlan, distribution, sample_rows
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, stream
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState


@PROPOSERS.register("draft_model")
@dataclass(frozen=True)
class DraftModel:
    """Options of a draft model: its weights, of any model that the runtime serves."""

    source: WeightSource

    def build(self, setting: ProposerSetting) -> "DraftModelProposer":
        """Load the draft model.

        Raises:
            UsageError: its vocabulary has another size than the target model's.
        """
        draft = self.source.arch
        target = setting.arch
        if draft.vocab_size != target.vocab_size:
            raise UsageError(
                f"the draft model has {draft.vocab_size} tokens and the model {target.vocab_size}: a draft "
                "must have the model's tokenizer."
            )
        return DraftModelProposer(self.source, setting)


class DraftModelProposer:
    """A loaded draft model. Its pages are allocated by `begin`."""

    feature_layers = ()
    num_rewritten_rows = 1
    num_tokens_after = 0
    on_device = True

    def __init__(self, source: WeightSource, setting: ProposerSetting) -> None:
        self._arch = source.arch
        self._setting = setting
        self._weights = load_model(source, setting.deployment)
        self._kv_format = DENSE_FORMATS[setting.deployment.dtype]
        self.weight_bytes = self._weights.weight_bytes
        self._num_positions = setting.deployment.num_positions(source.arch)
        self.kv_bytes_per_token = kv_bytes_per_token(
            source.arch, self._kv_format, num_positions=self._num_positions
        )
        # It reads the last token but one again, and a graph is warmed up by a run that is done again.
        self._num_kept = setting.k + 2
        self.bytes_per_request = slot_bytes(source.arch, self._num_kept)

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Allocate the pages of the draft model.

        Raises:
            UsageError: the draft model has fewer positions than the engine serves.
        """
        if self._arch.max_position < sizes.max_model_len:
            raise UsageError(
                f"the draft model has {self._arch.max_position} positions and the engine serves sequences "
                f"of {sizes.max_model_len} tokens; set max_model_len to {self._arch.max_position} at most, "
                "or choose a draft model with a longer context."
            )
        device = self._setting.deployment.device
        cache = KVCache(
            self._arch,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            kv_format=self._kv_format,
            device=device,
            num_slots=sizes.num_slots,
            num_kept=self._num_kept,
            num_positions=self._num_positions,
        )
        self._cache = cache
        self._runner = ModelRunner(self._weights, cache, max_model_len=sizes.max_model_len)
        self._graphs: Graphs[Tensor] = Graphs(device, self._setting.deployment.max_batch_size)
        self._probs_SKV: Tensor | None = None
        if self._setting.draws:
            shape = self._graphs.max_rows, self._setting.k, self._arch.vocab_size
            self._probs_SKV = torch.zeros(shape, dtype=torch.float64, device=device)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self._runner.kernel_report()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in the draft model's pages."""
        self._cache.copy_blocks(pairs)

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Write the keys and values of the draft model, without logits."""
        self._runner.prefill(replace(batch, wanted_rows_W=batch.wanted_rows_W[:0]), short=short)

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Ignore hidden states: it reads tokens alone."""

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
        context_lens_R = state.context_lens_S[:num_rows]
        if self._probs_SKV is not None:
            sampling = stream(sampling, PROPOSAL_STREAM)
        feed_RQ = state.last_SN[:num_rows, -2:]
        tokens = []
        for step in range(state.k):
            q_len = feed_RQ.shape[1]
            logits_RV = state.logits(self._runner, feed_RQ, context_lens_R + step)[
                q_len - 1 :: q_len
            ].contiguous()
            feed_RQ = sample_rows(logits_RV, sampling, context_lens_R + step, plan).tokens_R.unsqueeze(1)
            if self._probs_SKV is not None and plan.draws:
                self._probs_SKV[:num_rows, step] = distribution(logits_RV, sampling, plan)
            tokens.append(feed_RQ)
        return torch.cat(tokens, dim=1)
