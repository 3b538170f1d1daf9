"""Speculative decoding as the engine sees it: how it is asked for, one step of it, and what came of it.

Each step is for itself: the host knows the tokens of the last one before it loads the next, so that a step is not launched ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.runtime.loader import Target
from compress.runtime.model_runner import Features, ModelRunner, PrefillBatch
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.graphs import Graphs
from compress.runtime.speculative.proposer import Pages, Proposer, ProposerOptions, Setting
from compress.runtime.speculative.state import RunningRow, SpeculativeState
from compress.runtime.speculative.verify import Verified, VerifyOutputs, VerifySteps

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
            raise UsageError(f"speculative: forced_rate is {self.forced_rate}; it must be in 0..1, and is for benchmarks only.")

    def build(self, arch: Arch, target: Target, *, block_size: int) -> Proposer:
        return self.proposer.build(Setting(arch, target, self.k, draws=self.rule == "rejection", block_size=block_size))


@dataclass(frozen=True)
class Acceptance:
    """Counts of a run. A row is one request in one step; of `proposed[j]` rows whose token j was verified, `accepted[j]` kept it."""

    num_steps: int
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
        return tuple(kept / made if made else 0.0 for kept, made in zip(self.accepted, self.proposed, strict=True))

    def __add__(self, other: "Acceptance") -> "Acceptance":
        proposed, accepted = (
            tuple(a + b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.proposed, other.proposed), (self.accepted, other.accepted))
        )
        return Acceptance(self.num_steps + other.num_steps, self.num_rows + other.num_rows, proposed, accepted)


class Speculation:
    """One engine's proposer, verification and counts."""

    def __init__(self, config: Speculative, proposer: Proposer, runner: ModelRunner, pages: Pages, target: Target) -> None:
        self._proposer, self._runner = proposer, runner
        proposer.begin(pages, runner.embedding)
        graphs: Graphs[VerifyOutputs] = Graphs(target.device, target.max_batch_size)
        self._state = SpeculativeState(
            max_rows=graphs.max_rows, max_model_len=pages.max_model_len, block_size=pages.block_size, k=config.k, device=target.device
        )
        self._steps = VerifySteps(runner, self._state, proposer, graphs, rule=config.rule, forced_rate=config.forced_rate)
        self._counts: list[int] = []
        self.k = config.k
        self.last = self._nothing = Acceptance(0, 0, (0,) * config.k, (0,) * config.k)
        self.total = self.last

    def prefill(self, batch: PrefillBatch, *, short: bool) -> Tensor:
        """The model's, and then the proposer's: logits as of `ModelRunner.prefill`."""
        depths = self._proposer.feature_layers
        features = Features.empty(depths, len(batch.tokens_T), self._runner.embedding) if depths else None
        logits_WV = self._runner.prefill(batch, short=short, features=features)
        self._proposer.prefill(batch, features, short=short)
        return logits_WV

    def launch(self, rows: Sequence[RunningRow]) -> Verified:
        self._state.load(rows)
        drafts = self._proposer.propose(rows, self._state)
        self._counts = [min(count, row.limit) for count, row in zip(drafts.counts, rows, strict=True)]
        return self._steps.launch(len(rows), drafts)

    def read(self, verified: Verified) -> list[list[int]]:
        """The tokens that come out of each row of the step that was launched last, and has been waited for; they are counted."""
        tokens, k = verified.tokens, self.k
        proposed = tuple(sum(count > place for count in self._counts) for place in range(k))
        accepted = tuple(sum(len(each) > place + 1 for each in tokens) for place in range(k))
        self.last = Acceptance(1, len(tokens), proposed, accepted)
        self.total += self.last
        return tokens

    def reset(self) -> None:
        """Count anew."""
        self.total = self.last = self._nothing
