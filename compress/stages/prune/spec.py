"""The recipe keys of `prune`: how much stays of heads, FFN and depth, or how small or fast the model is to
become."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from compress.errors import UsageError
from compress.methods.prune import COMPENSATIONS, LAYER_SCORERS, SCORERS, Compensation
from compress.methods.prune.compensations import LeastSquares
from compress.methods.prune.obs import Obs
from compress.models.arch import Arch
from compress.models.expert_pruning import with_experts
from compress.models.pruning import (
    HeadUnit,
    Widths,
    as_mistral,
    can_have_bias,
    why_channels_stay,
    why_heads_stay,
    why_layers_stay,
)
from compress.recipe import MAX_SAMPLES, MAX_SEQ_LEN, MAX_SIZE, ByKind, Spec, checked_by, list_to_tuple
from compress.stages import specs_of
from compress.stages.budget.spec import StepRows, TimedDevice
from compress.stages.dequantize import check_dense
from compress.stages.prune.widths import divisors_hint, legal_channels, legal_heads, nearest_legal, with_heads

Keep = Annotated[float, Field(gt=0, lt=1)] | Annotated[int, Field(ge=1, le=MAX_SIZE)]
Axis = Literal["heads", "ffn", "depth"]
AXES: tuple[Axis, ...] = ("heads", "ffn", "depth")


def _layer_score(name: str) -> None:
    LAYER_SCORERS.get(name)


class Heads(Spec):
    """Query heads that stay in every layer."""

    keep: Keep = Field(
        description="a share of the query heads (0.75), or their number (24); the nearest legal number is "
        "taken"
    )
    unit: HeadUnit = Field(
        "kv_group",
        description="what goes: KV heads with their query heads, or the same number of query heads of each",
    )


class Ffn(Spec):
    """FFN channels that stay in every layer."""

    keep: Keep = Field(
        description="a share of the channels, or their number; the nearest legal number is taken"
    )


class ExpertAxis(Spec):
    """Experts that stay in every layer that has some."""

    keep: Keep = Field(description="a share of the experts of a layer, or their number")
    score: Literal["reap"] = Field(
        "reap",
        description="`reap`: the mean, over the tokens of an expert, of the router's weight times the norm "
        "of its output",
    )

    def num_kept(self, arch: Arch) -> int:
        """Return the number of experts that stay in a layer."""
        mixtures = [each.experts for each in arch.layers if each.experts is not None]
        whole = max((each.num_experts for each in mixtures), default=0)
        return self.keep if isinstance(self.keep, int) else max(1, round(self.keep * whole))


class Depth(Spec):
    """Layers that stay."""

    keep: Keep = Field(description="a share of the layers, or their number")
    score: Annotated[str, checked_by(_layer_score)] = Field(
        "block_influence", description="how much a layer does"
    )


def _check_axes(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise UsageError("name every axis once.")


class PruningBudget(Spec):
    """One limit of size or of time, and what may be removed to keep it."""

    params_frac: float | None = Field(
        None, gt=0, lt=1, description="parameters of the whole model, as a share of the source's"
    )
    latency_frac: float | None = Field(
        None, gt=0, lt=1, description="time of a decode step in 16 bits, as a share of the source's"
    )
    prune: Annotated[tuple[Axis, ...], BeforeValidator(list_to_tuple), checked_by(_check_axes)] = Field(
        AXES, min_length=1, description="what may be removed"
    )
    unit: HeadUnit = Field(
        "kv_group",
        description="of heads: KV heads with their query heads, or the same number of query heads of each",
    )
    rows: StepRows = 1
    context: int = Field(
        1024, ge=0, le=MAX_SEQ_LEN, description="positions in the cache of each sequence of that step"
    )
    device: TimedDevice = None
    num_samples: int = Field(
        16,
        ge=2,
        le=MAX_SAMPLES,
        description="samples of the calibration set that candidates are pruned on; a quarter more judge them",
    )

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.params_frac is None) == (self.latency_frac is None):
            raise ValueError("a target is one of params_frac and latency_frac.")
        if self.params_frac is not None and (self.rows != 1 or self.device is not None):
            raise ValueError(
                "params_frac is a number of parameters, which depends on neither rows nor device. Leave them "
                "out."
            )
        return self

    @property
    def limit(self) -> float:
        """The share of the source's cost that is allowed."""
        frac = self.params_frac if self.params_frac is not None else self.latency_frac
        assert frac is not None, "a target has one limit"
        return frac

    @property
    def text(self) -> str:
        """The budget in words, for notes and reports."""
        if self.params_frac is not None:
            return f"params_frac {self.params_frac:g}"
        device = self.device or "this device"
        return f"latency_frac {self.latency_frac:g} for {self.rows} x {self.context} positions on {device}"


def kinds_by_name(raw: Any) -> Any:
    """Take `score: obs` for `score: {kind: obs}`."""
    if not isinstance(raw, Mapping):
        return raw
    return {
        key: {"kind": value} if key in ("score", "compensate") and isinstance(value, str) else value
        for key, value in raw.items()
    }


def scorers() -> Mapping[str, type[Spec]]:
    """Return the specs of the scores by name."""
    return specs_of(SCORERS)


def compensations() -> Mapping[str, type[Spec]]:
    """Return the specs of the compensations by name."""
    return specs_of(COMPENSATIONS)


class Prune(Spec):
    """The parts that are removed, how they are chosen, and how the rest compensates."""

    heads: Heads | None = Field(None, description="attention heads that stay; left out, all do")
    ffn: Ffn | None = Field(None, description="FFN channels that stay; left out, all do")
    depth: Depth | None = Field(None, description="layers that stay; left out, all do")
    experts: ExpertAxis | None = Field(
        None,
        description="experts that stay in each layer of a mixture; left out, all do",
        exclude_if=lambda value: value is None,  # keeps the cache keys of recipes older than this option
    )
    target: PruningBudget | None = Field(
        None,
        description="instead of those three: how small or fast the model is to be, and what may go for it",
    )
    multiple: int = Field(
        128,
        ge=1,
        le=MAX_SIZE,
        description="widths that quantized linears read (heads times their dimension, FFN) stay a multiple "
        "of this",
    )
    as_mistral: bool = Field(
        False,
        description="write a Llama as a Mistral, which computes the same: `transformers` refuses a Llama "
        "whose heads do not divide its hidden size",
    )
    score: Annotated[Spec, ByKind(scorers)] = Field(Obs(), description="how units are chosen")
    compensate: Annotated[Spec, ByKind(compensations)] = Field(
        LeastSquares(), description="how the columns that stay make up for those that go"
    )
    rounds: int = Field(
        1, ge=1, le=32, description="in how many steps: after each, everything is observed anew"
    )

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_name(cls, raw: Any) -> Any:
        return kinds_by_name(raw)

    @model_validator(mode="after")
    def _something_goes(self) -> Self:
        by_hand = [name for name in AXES if getattr(self, name) is not None]
        if self.target is not None and by_hand:
            raise ValueError(f"target decides what {', '.join(by_hand)} would say: give one or the other.")
        if self.target is None and not by_hand and self.experts is None:
            raise ValueError(
                "nothing is to go: give heads, ffn, depth or experts, such as `ffn: {keep: 0.75}`, or a "
                "target."
            )
        return self

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which something may be removed."""
        return (
            self.target.prune
            if self.target is not None
            else tuple(name for name in AXES if getattr(self, name) is not None)
        )

    @property
    def unit(self) -> HeadUnit:
        """The unit in which heads are removed."""
        return next((each.unit for each in (self.heads, self.target) if each is not None), "kv_group")

    def recast(self, arch: Arch) -> Arch:
        """Return the model as it is pruned: the source, or with `as_mistral` its recast.

        Raises:
            UsageError: it is to be a Mistral and is no Llama.
        """
        return as_mistral(arch) if self.as_mistral else arch

    def explicit_widths(self, arch: Arch) -> Widths:
        """Return the widths that heads, ffn and depth name, where no `target` decides them.

        Raises:
            UsageError: an axis keeps everything, or more than there is.
        """
        widths = Widths.of(arch)
        if self.heads is not None:
            num_heads = nearest_legal(
                legal_heads(arch, self.unit, self.multiple),
                self.heads.keep,
                "heads",
                self.multiple,
                hint=divisors_hint(arch),
            )
            widths = with_heads(arch, widths, num_heads, self.unit)
        if self.ffn is not None:
            widths = replace(
                widths,
                intermediate_size=nearest_legal(
                    legal_channels(arch, self.multiple), self.ffn.keep, "ffn", self.multiple
                ),
            )
        if self.depth is not None:
            widths = replace(
                widths, num_layers=nearest_legal(range(1, arch.num_layers + 1), self.depth.keep, "depth", 1)
            )
        return widths

    def check_model(self, arch: Arch) -> None:
        """Refuse a model that cannot be pruned, or not so.

        Raises:
            UsageError: layers differ in width, heads or channels cannot go, or the compensation needs biases
                that the model cannot have.
            UnsupportedFormat: the model is quantized.
        """
        check_dense(arch, "pruning puts new weights in the place of codes")
        if arch.has_experts and "ffn" in self.axes:
            raise UsageError(
                "ffn: the channels of experts are not pruned; remove whole experts, such as `experts: {keep: "
                "0.75}`, or name `target: {prune: [heads, depth]}`."
            )
        if "ffn" in self.axes and (reason := why_channels_stay(arch)) is not None:
            raise UsageError(f"ffn: {reason}")
        if self.experts is not None:
            with_experts(arch, self.experts.num_kept(arch))
        if self.axes and not arch.is_uniform:
            raise UsageError(
                "the layers of this model differ in width; pruning keeps the same numbers in every layer, "
                "which it cannot say here."
            )
        of_layers = why_layers_stay(arch)
        if "depth" in self.axes and of_layers is not None:
            raise UsageError(f"depth: {of_layers}")
        reason = why_heads_stay(arch)
        if "heads" in self.axes and reason is not None:
            stays = {"`ffn`": why_channels_stay(arch), "`depth`": of_layers}
            others = " and ".join(axis for axis, why in stays.items() if why is None)
            raise UsageError(f"heads: {reason}{f' Prune {others}.' if others else ''}")
        compensation = cast(Compensation, self.compensate)
        of_axis: dict[Axis, str] = {"heads": "attn.o", "ffn": "ffn.down"}
        without = [
            name for axis, name in of_axis.items() if axis in self.axes and not can_have_bias(arch, name)
        ]
        if compensation.needs_bias and without:
            raise UsageError(
                f"compensate: bias needs a bias in {' and '.join(without)}, and the config of a "
                f"{arch.family} model has no word for one. "
                "Take `compensate: least_squares`, which needs none."
            )
