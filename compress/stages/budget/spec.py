"""The recipe keys of mixed precision: the schemes to choose from, and one budget of bytes or of time."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from compress.errors import UsageError, did_you_mean
from compress.quant.scheme import DENSE, SCHEMES, Scheme
from compress.recipe import MAX_SAMPLES, MAX_SIZE, Spec, checked_by, list_to_tuple
from compress.stages.budget.tables import latency_table

_SIZES = ("size_ratio", "size_gb")
_LATENCIES = ("latency_ratio", "latency_us")


def scheme_or_dense(name: str) -> Scheme | None:
    """Return the scheme of that name, or None for `dense`.

    Raises:
        UsageError: the name is neither.
    """
    if name != DENSE and name not in SCHEMES:
        raise UsageError(f"unknown scheme '{name}'.{did_you_mean(name, [*SCHEMES, DENSE])}")
    return None if name == DENSE else SCHEMES[name]


def _check_schemes(names: Sequence[str]) -> None:
    for name in names:
        scheme_or_dense(name)
    if len(set(names)) != len(names) or len(names) < 2 or set(names) == {DENSE}:
        raise UsageError("name two or more different schemes to choose from.")


def _check_device(device: str | None) -> None:
    if device is not None:
        latency_table(device)


StepRows = Annotated[
    int, Field(ge=1, le=128, description="tokens of the step whose time counts: the batch size")
]
TimedDevice = Annotated[
    str | None,
    checked_by(_check_device),
    Field(
        description="device whose kernel times count, from a table that ships (`NVIDIA H200`); left out, the "
        "times of this device are measured"
    ),
]


class Budget(Spec):
    """One limit: of bytes, or of the time of one decode step in the linears of all layers."""

    size_ratio: float | None = Field(
        None, gt=0, le=MAX_SIZE, description="bytes of the layers' linears, as a share of theirs in 16 bits"
    )
    size_gb: float | None = Field(
        None,
        gt=0,
        le=MAX_SIZE,
        description="of the whole checkpoint, embedding and head included, a draft not, in 10^9 bytes",
    )
    latency_ratio: float | None = Field(
        None,
        gt=0,
        le=MAX_SIZE,
        description="time of the layers' linears in a step, as a share of theirs in 16 bits",
    )
    latency_us: float | None = Field(None, gt=0, le=MAX_SIZE, description="the same in microseconds")
    rows: StepRows = 1
    device: TimedDevice = None

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        given = [name for name in (*_SIZES, *_LATENCIES) if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a budget is one of {', '.join((*_SIZES, *_LATENCIES))}; {' and '.join(given) or 'none'} "
                f"{'are' if len(given) > 1 else 'is'} given."
            )
        if given[0] in _SIZES and (self.rows != 1 or self.device is not None):
            raise ValueError(
                f"{given[0]} is a budget of bytes, which depend on neither rows nor device. Leave them out."
            )
        return self

    @property
    def is_time(self) -> bool:
        """Whether the limit is a time; else it is a number of bytes."""
        return self.latency_ratio is not None or self.latency_us is not None

    @property
    def text(self) -> str:
        """The budget in words, for notes and reports."""
        name = next(each for each in (*_SIZES, *_LATENCIES) if getattr(self, each) is not None)
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        where = f" for {rows} on {self.device or 'this device'}" if self.is_time else ""
        return f"{name} {getattr(self, name):g}{where}"


class Mixed(Spec):
    """The most accurate choice of a scheme for each linear group within a budget."""

    kind: Literal["mixed"] = "mixed"
    schemes: Annotated[tuple[str, ...], BeforeValidator(list_to_tuple), checked_by(_check_schemes)] = Field(
        description="what a linear group (qkv, o, gate_up or down of a layer) may get: schemes, and "
        f"`{DENSE}`",
        json_schema_extra={"items": {"enum": [*SCHEMES, DENSE]}},
    )
    budget: Budget = Field(description="the limit")
    num_samples: int = Field(
        32,
        ge=1,
        le=MAX_SAMPLES,
        description="samples of the calibration set that sensitivities are measured on",
    )
