"""Statistics of experts, of which each sees only the tokens that are routed to it, and what replaces those of
an expert that saw too few.

A moment of n tokens has at most rank n, and GPTQ trusts every direction of it. An expert with fewer than
`min_tokens` tokens is starved. `shrink` completes its statistics to `min_tokens` tokens with tokens as the
whole layer sees them:

    H = (n H_expert + (m - n) H_layer) / m,   m = min_tokens

so that the layer's share falls from 1 without a token to 0 with m, without a jump. H_layer is the moment of
all tokens at the input of the experts; before `down`, whose channels mean something else in every expert, it
is that of a sample of all tokens which the expert itself computed. Where an expert reads something else than
what the layer gives it (`Experts.changes_input`), both are of that sample, as this expert reads it.
`all_tokens` takes the statistics of every expert from all tokens instead, and `keep` leaves them as they are,
but for an expert without a token, which has none: it gets the layer's.

Shapes: T tokens, D hidden, F channels of an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from compress.calibrate.stats import InputStats, Stat, StatFactory
from compress.models.decoder import DecoderLayer
from compress.models.experts import ALL_TOKENS

StarvedPolicy = Literal["shrink", "all_tokens", "keep"]
POLICIES: tuple[StarvedPolicy, ...] = get_args(StarvedPolicy)
MIN_TOKENS = 512
SAMPLE_ROWS = 32
SAMPLE_EVERY = 64
"""Every how many tokens of a piece of samples one is kept, at least `SAMPLE_ROWS` of them: 4,096 tokens of
128 samples of 2,048."""


@dataclass(frozen=True)
class ExpertPolicy:
    """The number of tokens below which an expert is starved, and what its statistics are then."""

    min_tokens: int = MIN_TOKENS
    starved: StarvedPolicy = "shrink"


DEFAULT_POLICY = ExpertPolicy()


class Tokens:
    """The number of tokens."""

    is_quadratic = False

    def __init__(self) -> None:
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        self.num_tokens += len(x_TD)

    def merge(self, other: Self) -> None:
        self.num_tokens += other.num_tokens

    def compact(self) -> None:
        """Keep the number."""

    def rescale_(self, scale_D: Tensor) -> None:
        """Keep the number: a scale changes no tokens."""

    def complete_(self, target: Self, num_tokens: int) -> None:
        """Keep the number of the tokens that were seen."""


class TokenSample:
    """Some tokens of every piece, evenly spaced, in order."""

    is_quadratic = False

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, x_TD: Tensor) -> None:
        step = max(1, min(len(x_TD) // SAMPLE_ROWS, SAMPLE_EVERY))
        rows = max(SAMPLE_ROWS, len(x_TD) // SAMPLE_EVERY)
        self._rows.append(x_TD[::step][:rows].clone())

    def merge(self, other: Self) -> None:
        self._rows += other._rows

    def compact(self) -> None:
        """Keep the rows as they are, because they are few."""

    def rescale_(self, scale_D: Tensor) -> None:
        self._rows = [(rows / scale_D).to(rows.dtype) for rows in self._rows]

    def complete_(self, target: Self, num_tokens: int) -> None:
        """Keep the rows."""

    def rows(self) -> Tensor:
        """Return the tokens, [T, D]."""
        return torch.cat(self._rows)


def expert_of(tap: str) -> int | None:
    """Return the index of the expert whose tokens a tap sees, None for other taps."""
    name, _, idx = tap.partition(".")
    return int(idx) if name in ("moe_in", "moe_mid") else None


@torch.no_grad()
def complete_starved(
    stats: Mapping[str, InputStats],
    layer: DecoderLayer,
    of_layer: InputStats,
    kinds: Sequence[type[Stat]],
    policy: ExpertPolicy,
) -> dict[int, int]:
    """Complete the statistics of starved experts in place; return the tokens of each expert that has some
    statistics here.

    `of_layer` are the statistics of all tokens at the experts' input, with a `TokenSample`.
    """
    counts = dict[int, int]()
    for tap, of_expert in stats.items():
        expert = expert_of(tap)
        if expert is None:
            continue
        counts[expert] = num_tokens = of_expert[Tokens].num_tokens
        missing = policy.starved == "keep" and num_tokens > 0
        if missing or policy.starved == "all_tokens" or num_tokens >= max(1, policy.min_tokens):
            continue
        target = of_layer
        is_mid = tap.startswith("moe_mid.")
        if is_mid or layer.moe.facts.changes_input:
            x_TD = layer.moe.input_of(expert, of_layer[TokenSample].rows())
            if is_mid:
                x_TD = layer.get_submodule(f"moe.experts.{expert}").mid(x_TD)  # type: ignore[operator]
            target = InputStats(*(kind() for kind in kinds))
            for stat in target:
                stat.update(x_TD)
        for kind in kinds:
            of_expert[kind].complete_(target[kind], max(1, policy.min_tokens))
    return counts


def layer_kinds(tap: str, kinds: Sequence[StatFactory]) -> Sequence[StatFactory]:
    """Return the statistics to collect at a tap of a layer with experts."""
    if tap == ALL_TOKENS:
        return (*kinds, TokenSample)
    return kinds if expert_of(tap) is None else (*kinds, Tokens)
