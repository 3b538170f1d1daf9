"""Speculative decoding: a proposer drafts k tokens for every running request, and the model verifies them in
one step.

Where the proposer reads only the state on the device, a step may be launched before the host has read the
last one. The host then has bounds: a request has one token more, or as many more as the last step could
keep. It takes blocks for the most tokens, and the device computes how many proposals a row may keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.decode_run import FirstTokens, HostResults
from compress.runtime.deployment import Deployment
from compress.runtime.generation import Generation
from compress.runtime.graphs import Graphs
from compress.runtime.model_runner import ModelRunner
from compress.runtime.scheduler import Scheduler
from compress.runtime.speculative.proposer import CacheSizes, Drafts, Proposer
from compress.runtime.speculative.speculation import Acceptance, Speculative
from compress.runtime.speculative.state import SpeculativeState
from compress.runtime.speculative.verify import Verifier


@dataclass(frozen=True)
class VerifiedTokens:
    """The pending tokens of a verification step: for each request the proposals that were kept, and the token
    after them.

    `count` adds a step to the acceptance of the engine, given for each row the proposals that could be kept
    and its new tokens.
    """

    generations: Sequence[Generation]
    q_len: int
    has_logprobs: bool
    logits_TV: Tensor
    results: HostResults
    count: Callable[[Sequence[tuple[int, list[int]]]], None]

    def wait(self) -> None:
        """Wait until the device has chosen the tokens."""
        self.results.wait()

    def read(self) -> list[list[int]]:
        """Return the new tokens of each request, none for a request that ended in an earlier step. Call once:
        it counts them.
        """
        running = [not each.ended for each in self.generations]
        results = self.results.tokens.tolist()[: len(self.generations)]
        rows = [(count, tokens[: accepted + 1]) for count, accepted, *tokens in results]
        self.count([row for row, runs in zip(rows, running, strict=True) if runs])
        return [tokens if runs else [] for (_, tokens), runs in zip(rows, running, strict=True)]

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Log probabilities of the tokens, or None where no request wants them."""
        return self.results.logprobs.tolist()[: len(self.generations)] if self.has_logprobs else None

    @property
    def logits(self) -> Tensor:
        """Logits [R, Q, V], also those of rejected tokens, until the next step is launched."""
        return self.logits_TV[: len(self.generations) * self.q_len].unflatten(0, (-1, self.q_len))


class SpeculativeDecoding:
    """Launches verification steps of an engine, and counts acceptance: `last` of the last step read, `total`
    of all.
    """

    def __init__(
        self,
        config: Speculative,
        proposer: Proposer,
        runner: ModelRunner,
        sizes: CacheSizes,
        deployment: Deployment,
        scheduler: Scheduler,
    ) -> None:
        self._proposer = proposer
        self._runner = runner
        self._scheduler = scheduler
        proposer.begin(sizes, runner)
        graphs: Graphs[Tensor] = Graphs(deployment.device, deployment.max_batch_size)
        self._state = SpeculativeState(
            max_rows=graphs.max_rows,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            k=config.k,
            device=deployment.device,
        )
        self._verifier = Verifier(
            runner, self._state, proposer, graphs, rule=config.rule, forced_rate=config.forced_rate
        )
        self._k = config.k
        self._block_size = sizes.block_size
        self._generations: Sequence[Generation] = ()
        self._num_launched = 0
        self._any_kept = False
        self._none = Acceptance(0, (0,) * config.k, (0,) * config.k)
        self.last = self._none
        self.total = self._none

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the last one is read: the proposer then needs nothing from
        the host.
        """
        return self._proposer.on_device

    def prefill(self, batch: PrefillBatch, *, short: bool) -> Tensor:
        """Prefill the model's cache, then the proposer's; return logits as `ModelRunner.prefill` does."""
        depths = self._proposer.feature_layers
        features = (
            Features.empty(depths, len(batch.tokens_T), self._runner.stream_embedding) if depths else None
        )
        logits_WV = self._runner.prefill(batch, short=short, features=features)
        self._proposer.prefill(batch, features, short=short)
        return logits_WV

    def may_load_ahead(self, generations: Sequence[Generation]) -> bool:
        """Return False: proposers and limits need the last tokens on the host."""
        return False

    @torch.inference_mode()
    def load(self, generations: Sequence[Generation], firsts: FirstTokens | None = None) -> None:
        """Begin a run of steps of these requests, and take blocks for the proposals of the first one where
        there are free ones.

        The last token of a request is never fed, so one proposal fewer may be kept than tokens are left.
        """
        for each in generations:
            self._scheduler.extend(each, min(len(each.tokens) + self._k, each.end - 1))
        self._generations = generations
        self._num_launched = 0
        self._any_kept = any(self._limit(each) for each in generations)
        self._state.load(generations)

    def make_ready(self) -> bool:
        """Take blocks for one more step, in case the last one keeps all that it may.

        First come the blocks that the next step cannot do without, then those of what it may propose. Returns
        False where some request has all its tokens with the last step, or where no block is free.
        """
        generations = self._generations
        extend = self._scheduler.extend
        if any(each.num_left <= 1 for each in generations):
            return False
        held = [len(each.blocks) for each in generations]
        most = [(each, len(each.tokens) + 1 + self._limit(each)) for each in generations]
        if not all(extend(each, min(length, each.end - 1)) for each, length in most):
            return False
        for each, length in most:
            extend(each, min(length + self._k, each.end - 1))
        grown = {
            row_idx: each.blocks
            for row_idx, each in enumerate(generations)
            if len(each.blocks) > held[row_idx]
        }
        if grown:
            self._state.set_blocks(grown)
        self._any_kept = any(
            min(each.end - 1, len(each.blocks) * self._block_size) > len(each.tokens) + 1
            for each in generations
        )
        return True

    @torch.inference_mode()
    def launch(self) -> VerifiedTokens:
        """Launch the next step. If the proposer runs on the device, the last step need not have been read."""
        self._num_launched += 1
        state = self._state
        drafts = self._within_limits(self._proposer.propose(self._generations, state))
        any_kept = self._any_kept and (drafts.counts is None or any(drafts.counts))
        k = self._k if any_kept else 0
        logits_TV = self._verifier.launch(drafts, k=k)
        results = state.results[self._num_launched % 2]
        results.record()
        return VerifiedTokens(self._generations, 1 + k, state.plan.logprobs, logits_TV, results, self._count)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return the rows of the proposer, with "draft " before the name of each linear and op."""
        return [{**row, "linear": f"draft {row['linear']}"} for row in self._proposer.kernel_report()]

    def reset(self) -> None:
        """Set the counts of acceptance to zero."""
        self.total = self.last = self._none

    def _within_limits(self, drafts: Drafts) -> Drafts:
        """Return the drafts with no count above what the row may keep, so that a step without any is a plain
        one.
        """
        if drafts.counts is None:
            return drafts
        limits = [self._limit(each) for each in self._generations]
        return replace(drafts, counts=[min(pair) for pair in zip(drafts.counts, limits, strict=True)])

    def _limit(self, generation: Generation) -> int:
        """Return how many proposals the device may keep for a request with these tokens and blocks."""
        end = min(generation.end - 1, len(generation.blocks) * self._block_size)
        return max(0, min(self._k, end - len(generation.tokens)))

    def _count(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        places = range(self._k)
        proposed = tuple(sum(count > place for count, _ in rows) for place in places)
        accepted = tuple(sum(len(tokens) > place + 1 for _, tokens in rows) for place in places)
        self.last = Acceptance(len(rows), proposed, accepted)
        self.total += self.last
