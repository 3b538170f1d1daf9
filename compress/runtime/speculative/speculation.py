"""Speculative decoding as the engine sees it: how it is asked for, one step of it, and what came of it.

Where the proposer reads nothing but the state on the device, a step may be launched before the host knows what the last one gave. Then it
knows bounds: each request has one token more, or as many more as the last step could keep. Blocks are taken for the most, and how many
proposals a row may keep is the device's to say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.runtime.deployment import Deployment
from compress.runtime.model_runner import Features, ModelRunner, PrefillBatch
from compress.runtime.scheduler import Generation, Scheduler
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.graphs import Graphs
from compress.runtime.speculative.proposer import Pages, Proposer, ProposerOptions, Setting
from compress.runtime.speculative.state import RunningRow, SpeculativeState
from compress.runtime.speculative.verify import Verified, VerifySteps

MAX_K = 7
"""Decode attention serves the last eight positions of a request."""


@dataclass(frozen=True)
class Speculative:
    """`proposer`: options of a member of `PROPOSERS`; `k` tokens are proposed a step. `rule`: "coupled" gives the tokens of plain decoding,
    greedy and drawn alike; "rejection" keeps more of a draft model's proposals where tokens are drawn, and gives others of the same
    distribution. `forced_rate` is for benchmarks: proposals are kept with this probability, and what comes out is NOT the model's.

    Raises:
        UsageError: k or the rate is out of range.
    """

    proposer: ProposerOptions
    k: int = 4
    rule: Rule = "coupled"
    forced_rate: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_K:
            raise UsageError(f"speculative: k is {self.k}; it must be in 1..{MAX_K}.")
        if self.rule not in ("coupled", "rejection"):
            raise UsageError(f"speculative: rule is '{self.rule}'; it must be 'coupled' or 'rejection'.")
        if self.forced_rate is not None and not 0 <= self.forced_rate <= 1:
            raise UsageError(
                f"speculative: forced_rate is {self.forced_rate}; it must be in 0..1, and is for benchmarks only."
            )

    def build(self, arch: Arch, deployment: Deployment, *, block_size: int) -> Proposer:
        return self.proposer.build(
            Setting(arch, deployment, self.k, draws=self.rule == "rejection", block_size=block_size)
        )


@dataclass(frozen=True)
class Acceptance:
    """Counts of a run. A row is one request in one step; of `proposed[j]` rows whose token j was verified, `accepted[j]` kept it."""

    num_rows: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens that come out of a row in the mean, the model's own included; what lies behind an end of sequence counts."""
        return 1 + sum(self.accepted) / self.num_rows if self.num_rows else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Of each position, among the rows that had a token there."""
        return tuple(
            kept / made if made else 0.0 for kept, made in zip(self.accepted, self.proposed, strict=True)
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        proposed, accepted = (
            tuple(a + b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.proposed, other.proposed), (self.accepted, other.accepted))
        )
        return Acceptance(self.num_rows + other.num_rows, proposed, accepted)


@dataclass(frozen=True)
class SpeculativeStep:
    """A step on its way, whose it is, and who counts what came of it."""

    verified: Verified
    generations: Sequence[Generation]
    count: Callable[[Sequence[tuple[int, list[int]]]], None]

    def wait(self) -> None:
        self.verified.wait()

    def read(self) -> list[list[int]]:
        """The tokens that come out of each row, and none for a request that had ended before. Once, as they are counted."""
        serving = [bool(each.blocks) for each in self.generations]
        rows = self.verified.tokens
        self.count([row for row, serves in zip(rows, serving, strict=True) if serves])
        return [tokens if serves else [] for (_, tokens), serves in zip(rows, serving, strict=True)]

    @property
    def logprobs(self) -> list[list[float]] | None:
        return self.verified.logprobs

    @property
    def logits(self) -> Tensor:
        return self.verified.logits


class Speculation:
    """One engine's proposer, verification and counts."""

    def __init__(
        self,
        config: Speculative,
        proposer: Proposer,
        runner: ModelRunner,
        pages: Pages,
        deployment: Deployment,
        scheduler: Scheduler,
    ) -> None:
        self._proposer = proposer
        self._runner = runner
        self._scheduler = scheduler
        proposer.begin(pages, runner.embedding)
        graphs: Graphs[Tensor] = Graphs(deployment.device, deployment.max_batch_size)
        self._state = SpeculativeState(
            max_rows=graphs.max_rows,
            max_model_len=pages.max_model_len,
            block_size=pages.block_size,
            k=config.k,
            device=deployment.device,
        )
        self._steps = VerifySteps(
            runner, self._state, proposer, graphs, rule=config.rule, forced_rate=config.forced_rate
        )
        self._k = config.k
        self._block_size = pages.block_size
        self._generations: Sequence[Generation] = ()
        self._rows: list[RunningRow] = []
        self._num_launched = 0
        self._any_kept = False
        self.last = self._nothing = Acceptance(0, (0,) * config.k, (0,) * config.k)
        self.total = self.last

    @property
    def runs_ahead(self) -> bool:
        return self._proposer.on_device

    def prefill(self, batch: PrefillBatch, *, short: bool) -> Tensor:
        """The model's, and then the proposer's: logits as of `ModelRunner.prefill`."""
        depths = self._proposer.feature_layers
        features = Features.empty(depths, len(batch.tokens_T), self._runner.embedding) if depths else None
        logits_WV = self._runner.prefill(batch, short=short, features=features)
        self._proposer.prefill(batch, features, short=short)
        return logits_WV

    @torch.inference_mode()
    def load(self, generations: Sequence[Generation]) -> None:
        """The last token that may be generated is never fed, so that one fewer may be proposed, and no more than blocks can be had for."""
        for each in generations:
            self._scheduler.extend(each, min(len(each.tokens) + self._k, each.end - 1))
        self._rows = [
            RunningRow(each.tokens, each.end, each.blocks, each.request.params, self._limit(each))
            for each in generations
        ]
        self._generations = generations
        self._num_launched = 0
        self._any_kept = any(row.limit for row in self._rows)
        self._state.load(self._rows)

    def make_ready(self) -> bool:
        """Take blocks for the case that the last step keeps all that it may: first those that the next one cannot do without, then those of
        what it may propose. False where some request has all its tokens with the last step, or finds no block."""
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
            self._state.hold(grown)
        self._any_kept = any(
            min(each.end - 1, len(each.blocks) * self._block_size) > len(each.tokens) + 1
            for each in generations
        )
        return True

    @torch.inference_mode()
    def launch(self) -> SpeculativeStep:
        """The next step, of which the host need not know what the last one gave where the proposer is on the device."""
        self._num_launched += 1
        drafts = self._proposer.propose(self._rows, self._state)
        any_kept = self._any_kept and (drafts.counts is None or any(drafts.counts))
        verified = self._steps.launch(len(self._rows), self._num_launched, drafts, any_kept=any_kept)
        return SpeculativeStep(verified, self._generations, self._count)

    def kernel_report(self) -> list[dict[str, Any]]:
        """Of the proposer; linears and ops behind "draft "."""
        return [{**row, "linear": f"draft {row['linear']}"} for row in self._proposer.kernel_report()]

    def reset(self) -> None:
        """Count anew."""
        self.total = self.last = self._nothing

    def _limit(self, generation: Generation) -> int:
        """How many proposals the device will take at these tokens and blocks."""
        room = min(generation.end - 1, len(generation.blocks) * self._block_size) - len(generation.tokens)
        return max(0, min(self._k, room))

    def _count(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        places = range(self._k)
        proposed = tuple(sum(count > place for count, _ in rows) for place in places)
        accepted = tuple(sum(len(tokens) > place + 1 for _, tokens in rows) for place in places)
        self.last = Acceptance(len(rows), proposed, accepted)
        self.total += self.last
