"""Quantization = smoother x target x rounder x refiner x scheme. A method is one file: the paper's mathematics and the Spec that configures
it.

A smoother proposes a per-channel scale that may be moved in front of a group of linears; a target says which weights the codes are to come
near, if not the linear's own; a rounder turns weights into codes; a refiner improves codes and scales that a rounder gave, whichever it
was. All see the inputs of the group only through statistics. Methods know nothing of layers, files or one another; `stages/quantize`
puts them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import Stat, StatFactory
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

    def round(
        self, w_OI: Tensor, stats: Mapping[str, Stat], scheme: Scheme, *, scale_dtype: torch.dtype
    ) -> Rounded:
        """Codes of float32 weights [O, I]; blocks of rows are independent, and rows where each has its own scale, so linears that share
        an input may be stacked along O, each filled up to whole blocks (`whole_blocks`)."""


class Refiner(Protocol):
    """A Spec that improves what a rounder gave."""

    def stats(self) -> Mapping[str, StatFactory]:
        """Statistics it needs of the linears' input, by name."""

    def refine(
        self,
        w_OI: Tensor,
        weight: QuantizedWeight,
        stats: Mapping[str, Stat],
        outputs: OutputMoment | None = None,
    ) -> Rounded:
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
        self,
        w_OI: Tensor,
        stats: Mapping[str, Stat],
        scheme: Scheme,
        *,
        scale_dtype: torch.dtype,
        head_repeat: tuple[int, int],
    ) -> Tensor:
        """Positive float32 [I]: columns of the (stacked) weights are to be multiplied by it, their producer divided.

        `head_repeat` = (R, C): columns h * C + c and h' * C + c with h // R == h' // R must get the same scale; (1, 0) for no such tie.
        """


ROUNDERS: PluginSet[type[Rounder]] = PluginSet(
    "rounder", "compress.methods.quantize", group="compress.methods"
)
REFINERS: PluginSet[type[Refiner]] = PluginSet(
    "refiner", "compress.methods.quantize", group="compress.methods"
)
TARGETS: PluginSet[type[Target]] = PluginSet("target", "compress.methods.quantize", group="compress.methods")
SMOOTHERS: PluginSet[type[Smoother]] = PluginSet(
    "smoother", "compress.methods.quantize", group="compress.methods"
)
