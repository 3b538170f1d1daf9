"""Pruning = score x compensation, over units of columns of a linear.

A score decides which units stay, a compensation decides what the weights of the columns that stay become. A
layer score measures how much a whole layer does. Each is a Spec (the mapping `{kind: NAME, options}` of a
recipe) that derives from one of the classes below and is registered by name; `stages/prune` combines them and
`prune_pass.py` applies them to a layer.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.calibrate.stats import InputStats, Stat
from compress.models.pruning import Units
from compress.plugins import PluginSet
from compress.recipe import Spec


@dataclass(frozen=True)
class Candidates:
    """The units of one linear, some of which are to be removed.

    `w_OI` are its float32 weights, `stats` the statistics of its input that the score needs, `generator` is
    seeded for this linear alone. `loss_U` are predicted losses (`taylor.UnitLosses`), for a score with
    `gradient_samples` > 0.
    """

    w_OI: Tensor
    units: Units
    stats: InputStats
    generator: torch.Generator
    loss_U: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """The decision of a score: the units that stay, bool [U], and the scores of all, float32 [U] >= 0, larger
    for units that matter more."""

    kept_U: Tensor
    score_U: Tensor


class Scorer(Spec):
    """A rule that chooses which units stay."""

    @property
    def gradient_samples(self) -> int:
        """Number of calibration samples on which losses are predicted for it, 0 for none."""
        return 0

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the linear's input that `choose` reads."""
        return ()

    @abstractmethod
    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        """Choose the units to keep. Units that do nothing (weights or inputs all zero) are removed first."""


@dataclass(frozen=True)
class Compensated:
    """Float32 weights of the columns that stay, [O, kept], and what is added to the linear's bias, [O]."""

    w_OK: Tensor
    bias_O: Tensor | None = None


class Compensation(Spec):
    """A rule that changes what stays so that it makes up for the columns that are removed."""

    @property
    def needs_bias(self) -> bool:
        """True if `compensate` returns a bias, which the linear must then be able to have."""
        return False

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the linear's input that `compensate` reads."""
        return ()

    @abstractmethod
    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        """Return what replaces the float32 weights [O, I], of which the columns `kept_I`, bool [I], stay."""


class LayerScorer(Spec):
    """A measure of how much a layer does."""

    @abstractmethod
    def influence(self, before_TD: Tensor, after_TD: Tensor) -> Tensor:
        """Return how much a layer's output differs from its input, summed over the tokens of one sample: a
        float64 scalar."""


SCORERS: PluginSet[type[Scorer]] = PluginSet("score", "compress.methods.prune", group="compress.methods")
COMPENSATIONS: PluginSet[type[Compensation]] = PluginSet(
    "compensation", "compress.methods.prune", group="compress.methods"
)
LAYER_SCORERS: PluginSet[type[LayerScorer]] = PluginSet(
    "layer score", "compress.methods.prune", group="compress.methods"
)
