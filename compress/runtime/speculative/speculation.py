"""Speculative decoding as a caller sees it: the options of an engine, and the counts of how many proposals
were accepted.
"""

from dataclasses import dataclass

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.runtime.deployment import Deployment
from compress.runtime.speculative.acceptance import Rule
from compress.runtime.speculative.proposer import Proposer, ProposerOptions, ProposerSetting

MAX_K = 7
"""The most tokens that may be proposed in a step: decode attention serves the last eight positions of a
request."""


@dataclass(frozen=True)
class Speculative:
    """The options of speculative decoding: `k` tokens of `proposer`, a member of `PROPOSERS`, are verified in
    every step.

    With the rule "coupled" the tokens are those of plain decoding, greedy and drawn alike. With "rejection"
    more of a draft model's proposals are kept where tokens are drawn, and the tokens are others of the same
    distribution. `forced_rate` is for benchmarks: proposals are kept with this probability, and the tokens
    are NOT the model's.

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
                f"speculative: forced_rate is {self.forced_rate}; it must be in 0..1, and is for "
                "benchmarks only."
            )

    def build(self, arch: Arch, deployment: Deployment, *, block_size: int) -> Proposer:
        """Load the proposer for a target model.

        Raises:
            UsageError: it cannot propose for this model.
        """
        return self.proposer.build(
            ProposerSetting(arch, deployment, self.k, draws=self.rule == "rejection", block_size=block_size)
        )


@dataclass(frozen=True)
class Acceptance:
    """How many proposals were verified and accepted. A row is one request in one step.

    `proposed[j]` rows verified a proposal at place j, and `accepted[j]` of them kept it.
    """

    num_rows: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean number of new tokens of a row, the model's own included. Tokens after an end of sequence
        count.
        """
        return 1 + sum(self.accepted) / self.num_rows if self.num_rows else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the proposals at each place that were accepted."""
        return tuple(
            kept / made if made else 0.0 for kept, made in zip(self.accepted, self.proposed, strict=True)
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        proposed, accepted = (
            tuple(a + b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.proposed, other.proposed), (self.accepted, other.accepted))
        )
        return Acceptance(self.num_rows + other.num_rows, proposed, accepted)
