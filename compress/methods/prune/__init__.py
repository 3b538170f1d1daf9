"""Pruning = scorer x compensation, over units of columns of a linear: a scorer says which units stay, a compensation what the columns that
stay become. A layer scorer says how much a whole layer does. `stages/prune` puts them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.calibrate.stats import Stat, StatFactory
from compress.models.pruning import Units
from compress.plugins import PluginSet


@dataclass(frozen=True)
class Candidates:
    """Units of columns of a linear, some of which are to go: float32 weights [O, I], statistics of the inputs, for a scorer that asks for
    them the predicted losses [U] (`UnitLosses`), and randomness of this linear's own."""

    w_OI: Tensor
    units: Units
    stats: Mapping[str, Stat]
    generator: torch.Generator
    loss_U: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """bool [U], which units stay, as many as asked for; and [U], the larger the more a unit matters."""

    kept_U: Tensor
    score_U: Tensor


class Scorer(Protocol):
    """A Spec that says which units stay. `gradient_samples`: on how many samples it wants losses predicted, 0 for none."""

    @property
    def gradient_samples(self) -> int: ...

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linear's input, by name."""

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        """Units that do nothing (weights or inputs all zero) go first."""


@dataclass(frozen=True)
class Compensated:
    """Float32 weights of the columns that stay, [O, kept], and what is to be added to the linear's bias, [O]."""

    w_OK: Tensor
    bias_O: Tensor | None = None


class Compensation(Protocol):
    """A Spec that makes up for columns that go."""

    @property
    def needs_bias(self) -> bool: ...

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linear's input, by name."""

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: Mapping[str, Stat]) -> Compensated:
        """For float32 weights [O, I] of which the columns `kept_I`, bool [I], stay."""


class LayerScorer(Protocol):
    """A Spec that says how much a layer does."""

    def influence(self, before_TD: Tensor, after_TD: Tensor) -> Tensor:
        """Float64 scalar: over the tokens of one sample the sum of what tells a layer's output from its input."""


SCORERS: PluginSet[type[Scorer]] = PluginSet("score", "compress.methods.prune", group="compress.methods")
COMPENSATIONS: PluginSet[type[Compensation]] = PluginSet(
    "compensation", "compress.methods.prune", group="compress.methods"
)
LAYER_SCORERS: PluginSet[type[LayerScorer]] = PluginSet(
    "layer score", "compress.methods.prune", group="compress.methods"
)
