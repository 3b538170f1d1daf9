"""Quantization = smoother x rounding target x rounder x refiner x scheme; each of the first four is a method,
one file.

A smoother proposes a per-channel scale that is moved in front of a linear group. A rounding target is the
weight matrix that rounding approximates, if not the linear's own. A rounder turns weights into codes. A
refiner improves the codes and scales of any rounder. All read the inputs of the group only as statistics.
Methods import neither layers, files nor one another; `passes.py` applies them to a layer and
`stages/quantize` combines them.

To add a rounder, write one file in this package, for instance `shrunk.py` (complete but for its imports):

    @ROUNDERS.register("shrunk")                       # the `kind` that a recipe names
    class Shrunk(Rounder):                             # a pydantic model: its fields are the recipe's options
        # a docstring: what the method does

        kind: Literal["shrunk"] = "shrunk"             # the same name again
        range_frac: float = Field(                     # every option has a default and a description
            0.98, gt=0, le=1, description="share of the range of a group that codes cover"
        )

        def needs(self) -> tuple[type[Stat], ...]:     # what `round` reads; left out: no layer runs
            return (SecondMoment,)

        def round(
            self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype
        ) -> Rounded:
            h_II = stats[SecondMoment].mean()          # E[x x^T] of the group's input; here only for show
            w_OGN = grouped(w_OI, scheme)
            scale_OG, zero_OG = min_max_scale(w_OGN, scheme, scale_dtype, range_frac=self.range_frac)
            weight = round_to_nearest(w_OI, scheme, scale_OG, zero_OG)
            return Rounded(weight, {"inputs": len(h_II)})       # facts for the report

No list needs an edit: every module of the package is imported when a name is first looked up. Then run
`python -m scripts.docs` and `python -m tests.contract.test_stage_fingerprints`. `round: {kind: shrunk}` is
valid in a recipe, `compress schema` shows its options, and the contract test, which runs over the plug-in
sets, holds it to what a rounder must keep, under every scheme (the list is in `docs/extend.md`):

    python -m pytest tests/contract/test_methods_contract.py -k shrunk

Smoothers, rounding targets and refiners are added the same way, with their own class and plug-in set below. A
module of another distribution is named as an entry point of the group `compress.methods`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import InputStats, Stat
from compress.plugins import PluginSet
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.recipe import Spec


@dataclass(frozen=True)
class Rounded:
    """A quantized weight, and facts for the report about how it was found (damping, ...)."""

    weight: QuantizedWeight
    facts: Mapping[str, Any] = field(default_factory=dict)


class Rounder(Spec):
    """A rule that turns weights into codes and scales."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the group's input that `round` reads.

        Where nothing needs any, no layer runs, and `round` gets some rows of a linear and no statistics.
        """
        return ()

    @property
    def one_scale(self) -> bool:
        """Whether all linears of a group get one scale; then they are always rounded as one matrix."""
        return False

    @abstractmethod
    def round(self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        """Quantize float32 weights [O, I], with scales stored in `scale_dtype`.

        Rows that share no scale are independent, so the linears of a group may be stacked along O, each
        padded to whole blocks of rows (`quant.numerics.whole_blocks`).
        """


class Refiner(Spec):
    """A rule that improves the codes and scales that a rounder found."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the group's input that `refine` reads."""
        return ()

    @abstractmethod
    def refine(
        self,
        w_OI: Tensor,
        weight: QuantizedWeight,
        stats: InputStats,
        outputs: OutputMoment | None = None,
    ) -> Rounded:
        """Return better codes and scales, of the same shapes and dtypes as those of `weight`, for float32
        weights [O, I].

        The weights are stacked as in `Rounder.round`. `outputs`, where a guide provides it, couples the
        errors of rows.
        """


class RoundingTarget(Spec):
    """A rule for the weights that rounding approximates."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the group's input that `target` reads."""
        return ()

    @abstractmethod
    def target(self, w_OI: Tensor, stats: InputStats) -> Tensor:
        """Return the float32 weights [O, I] that rounder and refiner approximate, for a linear's own [O, I];
        rows are independent."""


class Smoother(Spec):
    """A rule that proposes a scale per input channel."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics of the group's input that `scale` reads."""
        return ()

    @abstractmethod
    def no_effect_on(self, scheme: Scheme) -> str | None:
        """Return why it has no effect on weights of this scheme, as the end of a sentence; None where it has
        one."""

    @abstractmethod
    def scale(
        self,
        w_OI: Tensor,
        stats: InputStats,
        scheme: Scheme,
        *,
        scale_dtype: torch.dtype,
        head_repeat: tuple[int, int],
    ) -> Tensor:
        """Return a positive float32 scale [I]: the columns of the (stacked) weights are multiplied by it,
        their producer is divided.

        `head_repeat` = (R, C): columns h * C + c and h' * C + c with h // R == h' // R read one channel and
        get the same scale; (1, 0) if no two columns do.
        """


ROUNDERS: PluginSet[type[Rounder]] = PluginSet(
    "rounder", "compress.methods.quantize", group="compress.methods"
)
REFINERS: PluginSet[type[Refiner]] = PluginSet(
    "refiner", "compress.methods.quantize", group="compress.methods"
)
TARGETS: PluginSet[type[RoundingTarget]] = PluginSet(
    "rounding target", "compress.methods.quantize", group="compress.methods"
)
SMOOTHERS: PluginSet[type[Smoother]] = PluginSet(
    "smoother", "compress.methods.quantize", group="compress.methods"
)
