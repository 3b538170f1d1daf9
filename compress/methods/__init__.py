"""Quantization = smoother x target x rounder x refiner x scheme. A method is one file: the paper's mathematics and the Spec that configures
it.

A smoother proposes a per-channel scale that may be moved in front of a group of linears; a target says which weights the codes are to come
near, if not the linear's own; a rounder turns weights into codes; a refiner improves codes and scales that a rounder gave, whichever it
was. All see the inputs of the group only through statistics. Methods know nothing of layers, files or one another; `stages/quantize.py`
puts them together.

Pruning = scorer x compensation, over units of columns of a linear: a scorer says which units stay, a compensation what the columns that
stay become. A layer scorer says how much a whole layer does. `stages/prune` puts them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import Stat, StatFactory
from compress.models.pruning import Units
from compress.plugins import PluginSet
from compress.quant.scheme import QuantizedWeight, Scheme


@dataclass(frozen=True)
class Rounded:
    """Codes of a weight, and what the report should say about how they came to be (damping, ...)."""

    weight: QuantizedWeight
    facts: Mapping[str, Any] = field(default_factory=dict)


class Rounder(Protocol):
    """A Spec that rounds."""

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linears' input, by name."""

    def round(self, w_OI: Tensor, stats: Mapping[str, Stat], scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        """Codes of float32 weights [O, I]; blocks of rows are independent, and rows where each has its own scale, so linears that share
        an input may be stacked along O, each filled up to whole blocks (`whole_blocks`)."""


class Refiner(Protocol):
    """A Spec that improves what a rounder gave."""

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linears' input, by name."""

    def refine(self, w_OI: Tensor, weight: QuantizedWeight, stats: Mapping[str, Stat], outputs: OutputMoment | None = None) -> Rounded:
        """Better codes and scales, in the form that `weight` has, for float32 weights [O, I], which are stacked as in `round`; `outputs`
        says which of the rows err together, where that is known."""


class Target(Protocol):
    """A Spec that moves what is aimed at."""

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linears' input, by name."""

    def target(self, w_OI: Tensor, stats: Mapping[str, Stat]) -> Tensor:
        """The float32 weights [O, I] that rounder and refiner take for float32 weights [O, I]; rows are independent."""


class Smoother(Protocol):
    """A Spec that proposes scales."""

    def stats(self) -> Mapping[str, StatFactory]: ...

    def idle(self, scheme: Scheme) -> str | None:
        """Why it does nothing for weights of this scheme, None where it does something."""

    def scale(
        self, w_OI: Tensor, stats: Mapping[str, Stat], scheme: Scheme, *, scale_dtype: torch.dtype, head_repeat: tuple[int, int]
    ) -> Tensor:
        """Positive float32 [I]: columns of the (stacked) weights are to be multiplied by it, their producer divided.

        `head_repeat` = (R, C): columns h * C + c and h' * C + c with h // R == h' // R must get the same scale; (1, 0) for no such tie.
        """


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


ROUNDERS: PluginSet[type[Rounder]] = PluginSet("rounder", "compress.methods")
REFINERS: PluginSet[type[Refiner]] = PluginSet("refiner", "compress.methods")
TARGETS: PluginSet[type[Target]] = PluginSet("target", "compress.methods")
SMOOTHERS: PluginSet[type[Smoother]] = PluginSet("smoother", "compress.methods")
SCORERS: PluginSet[type[Scorer]] = PluginSet("score", "compress.methods")
COMPENSATIONS: PluginSet[type[Compensation]] = PluginSet("compensation", "compress.methods")
LAYER_SCORERS: PluginSet[type[LayerScorer]] = PluginSet("layer score", "compress.methods")
