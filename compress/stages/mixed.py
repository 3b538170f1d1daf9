"""`scheme: {kind: mixed}` of the quantize stage: which scheme each projection gets, by what it costs in accuracy and in bytes or time.

A unit is a projection (qkv, o, gate_up, down) of one layer: what one kernel multiplies by. Its sensitivities come from one backward pass
over part of the calibration set (`methods/sensitivity.py`), its bytes from the scheme, its time from this device or from a table that
ships (`kernels/latency.py`); `methods/mixed.py` chooses. The choice is then what per-layer overrides are.

What was measured lies in the scratch directory before anything is decided by it, so that a resumed run decides the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.calibrate.gradients import visit_gradients
from compress.digest import canonical_json, digest_json
from compress.errors import UsageError, did_you_mean
from compress.kernels.coverage import PROJECTIONS, linear_shape
from compress.kernels.latency import latency_table
from compress.methods.mixed import Option, Point, allocate, frontier, point
from compress.methods.sensitivity import Sensitivities
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.numerics import GRID_SIZE
from compress.quant.scheme import DENSE, SCHEMES, ModelScheme, Scheme, commonest, name_of
from compress.recipe import Spec, checked_by
from compress.runtime.linear_time import linear_time_us
from compress.runtime.loader import Target
from compress.validate.roofline import environment_facts

SENSITIVITIES_NAME, LATENCIES_NAME = "sensitivities.json", "latencies.json"
MAX_FRONTIER_POINTS = 100
_TICKS_PER_US = 100
"""Times are whole hundredths of a microsecond where allocations are compared."""
_SIZES, _LATENCIES = ("size_ratio", "size_gb"), ("latency_ratio", "latency_us")
Times = dict[tuple[str, int, int, str], tuple[float, str]]
"""(projection, n, k, scheme) -> microseconds, and where they are from."""


def scheme_or_dense(name: str) -> Scheme | None:
    """The scheme of that name, None for `dense`.

    Raises:
        UsageError: neither.
    """
    if name != DENSE and name not in SCHEMES:
        raise UsageError(f"unknown scheme '{name}'.{did_you_mean(name, [*SCHEMES, DENSE])}")
    return None if name == DENSE else SCHEMES[name]


def _as_tuple(names: Any) -> Any:
    """A list, as a file has it: where a spec around this one has looked at it before, it is no JSON any more, and a tuple is expected."""
    return tuple(names) if isinstance(names, list) else names


def _choices(names: Sequence[str]) -> None:
    for name in names:
        scheme_or_dense(name)
    if len(set(names)) != len(names) or len(names) < 2 or set(names) == {DENSE}:
        raise UsageError("name two or more different schemes to choose from.")


def _known_device(device: str | None) -> None:
    if device is not None:
        latency_table(device)


class Budget(Spec):
    """One limit: of bytes, or of the time of one decode step in the linears of all layers."""

    size_ratio: float | None = Field(None, gt=0, description="bytes of the layers' linears, as a share of theirs in 16 bits")
    size_gb: float | None = Field(None, gt=0, description="of the whole checkpoint, embedding and head included, in 10^9 bytes")
    latency_ratio: float | None = Field(None, gt=0, description="time of the layers' linears in a step, as a share of theirs in 16 bits")
    latency_us: float | None = Field(None, gt=0, description="the same in microseconds")
    rows: int = Field(1, ge=1, le=128, description="tokens of the step whose time counts: the batch size")
    device: Annotated[str | None, checked_by(_known_device)] = Field(
        None, description="whose kernel times count, by a table that ships (`NVIDIA H200`); left out, those of this device are measured"
    )

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = [name for name in (*_SIZES, *_LATENCIES) if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a budget is one of {', '.join((*_SIZES, *_LATENCIES))}; {' and '.join(given) or 'none'} is given.")
        if given[0] in _SIZES and (self.rows != 1 or self.device is not None):
            raise ValueError(f"{given[0]} is a budget of bytes, which depend on neither rows nor device. Leave them out.")
        return self

    @property
    def of_time(self) -> bool:
        return self.latency_ratio is not None or self.latency_us is not None

    @property
    def text(self) -> str:
        name = next(each for each in (*_SIZES, *_LATENCIES) if getattr(self, each) is not None)
        where = f" for {self.rows} row{'s' if self.rows > 1 else ''} on {self.device or 'this device'}" if self.of_time else ""
        return f"{name} {getattr(self, name):g}{where}"


class Mixed(Spec):
    """The most accurate choice of a scheme for each projection within a budget."""

    kind: Literal["mixed"] = "mixed"
    schemes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), checked_by(_choices)] = Field(
        description=f"what a projection may get: schemes, and `{DENSE}`",
        json_schema_extra={"items": {"enum": [*SCHEMES, DENSE]}},
    )
    budget: Budget
    num_samples: int = Field(32, ge=1, description="samples of the calibration set that sensitivities are measured on")


@dataclass(frozen=True)
class Unit:
    """A projection of one layer. `schemes` are its choices: one where an override decides."""

    layer_idx: int
    name: str
    n: int
    k: int
    schemes: tuple[Scheme | None, ...]

    @property
    def linears(self) -> list[str]:
        return [f"layers.{self.layer_idx}.{linear}" for linear in PROJECTIONS[self.name]]

    def num_bytes(self, arch: Arch, scheme: Scheme | None) -> int:
        shapes = [arch.layers[self.layer_idx].linear_shape(linear, arch.hidden_size) for linear in PROJECTIONS[self.name]]
        return sum(2 * n * k if scheme is None else scheme.weight_bytes(n, k) for n, k in shapes)


def units_of(spec: Mixed, pinned: Mapping[str, Scheme | None], arch: Arch) -> list[Unit]:
    """Every projection with its choices; `pinned` are linears that overrides decide.

    Raises:
        UsageError: overrides decide some linears of a projection and not others, or differently.
    """
    choices = tuple(scheme_or_dense(name) for name in spec.schemes)
    units = []
    for layer_idx in range(arch.num_layers):
        for name in PROJECTIONS:
            unit = Unit(layer_idx, name, *linear_shape(arch, name, layer_idx=layer_idx), choices)
            said = {linear: pinned[linear] for linear in unit.linears if linear in pinned}
            if said and (len(said) < len(unit.linears) or len(set(said.values())) > 1):
                raise UsageError(
                    f"overrides: {', '.join(unit.linears)} read one input and are one product for every consumer, and overrides decide "
                    f"{', '.join(f'{linear} {name_of(scheme)}' for linear, scheme in said.items())} only. Give all of them one scheme."
                )
            units.append(replace(unit, schemes=(next(iter(said.values())),)) if said else unit)
    return units


def depends(spec: Mixed, device: str) -> dict[str, str]:
    """What decides the choice besides the recipe: the device whose kernels are timed, or the table that stands for it."""
    if not spec.budget.of_time:
        return {}
    if spec.budget.device is None:
        facts = environment_facts(torch.device(device))
        return {"machine": digest_json([facts.get(name) for name in ("device_key", "device", "driver")])}
    table = latency_table(spec.budget.device)
    return {"latency_table": digest_json([table.launch_us, table.bytes_per_us, sorted([*what, us] for what, us in table.us.items())])}


@dataclass(frozen=True)
class Costs:
    """What each scheme of each unit costs, all linears dense, and what is allowed: bytes, or hundredths of a microsecond. `times` is None
    where bytes are the budget."""

    by_unit: Sequence[Mapping[str, int]]
    dense: int
    limit: int
    times: Times | None


def costs_of(budget: Budget, units: Sequence[Unit], arch: Arch, *, outer_bytes: int, times: Times | None) -> Costs:
    """Raises UsageError: even the cheapest schemes do not keep the budget."""

    def cost(unit: Unit, scheme: Scheme | None) -> int:
        if times is None:
            return unit.num_bytes(arch, scheme)
        return round(times[unit.name, unit.n, unit.k, name_of(scheme)][0] * _TICKS_PER_US)

    by_unit = [{name_of(scheme): cost(unit, scheme) for scheme in unit.schemes} for unit in units]
    dense = sum(cost(unit, None) for unit in units)
    if budget.size_gb is not None:
        limit = int(budget.size_gb * 1e9) - outer_bytes
    elif budget.latency_us is not None:
        limit = int(budget.latency_us * _TICKS_PER_US)
    else:
        ratio = budget.size_ratio if budget.size_ratio is not None else budget.latency_ratio
        assert ratio is not None, "a budget has one limit"
        limit = int(ratio * dense)
    least = sum(min(each.values()) for each in by_unit)
    if least > limit:
        outer = f" ({outer_bytes / 1e9:.3f} GB go to embedding and head)" if budget.size_gb is not None else ""
        raise UsageError(
            f"the budget {budget.text} cannot be kept: in the cheapest of the schemes named, the linears of the layers cost "
            f"{least / dense:.3f} of what they do in 16 bits, and {max(limit, 0) / dense:.3f} is allowed{outer}. Allow more, or name a "
            "cheaper scheme."
        )
    return Costs(by_unit, dense, limit, times)


def largest_bytes(spec: Mixed, arch: Arch, units: Sequence[Unit], outer_bytes: int) -> int:
    """The most that the layers' linears may come to; what can be known of the budget before anything is measured is checked.

    Raises:
        UsageError: as `costs_of`.
    """
    budget, sizes = spec.budget, [{name_of(scheme): unit.num_bytes(arch, scheme) for scheme in unit.schemes} for unit in units]
    most = sum(max(each.values()) for each in sizes)
    if not budget.of_time:
        return min(most, costs_of(budget, units, arch, outer_bytes=outer_bytes, times=None).limit)
    if budget.device is None:
        return most
    costs = costs_of(budget, units, arch, outer_bytes=outer_bytes, times=_times_of(budget.device, budget.rows, units, arch))
    by_bytes = [
        [Option(name, -float(of_unit[name]), cost) for name, cost in times.items()]
        for of_unit, times in zip(sizes, costs.by_unit, strict=True)
    ]
    return -round(allocate(by_bytes, costs.limit).loss)


def effort(spec: Mixed, arch: Arch, *, num_samples: int, seq_len: int, width: int) -> tuple[int, float]:
    """Peak bytes and floating-point operations of the sensitivities: inputs of every layer are kept, a layer is there once for each scheme,
    with its statistics and what the search for scales makes of one linear."""
    num_tokens = min(spec.num_samples, num_samples) * seq_len
    schemes = [scheme for scheme in map(scheme_or_dense, spec.schemes) if scheme is not None]
    layer = max(arch.layers, key=lambda each: each.intermediate_size)
    shapes = [layer.linear_shape(name, arch.hidden_size) for name in layer.linears]
    params, largest = sum(n * k for n, k in shapes), max(n * k for n, k in shapes)
    hessians = 4 * sum({layer.linears[name]: layer.linear_shape(name, arch.hidden_size)[1] ** 2 for name in layer.linears}.values())
    peak = (arch.num_layers + 1) * num_tokens * arch.hidden_size * width
    peak += params * width * (1 + len(schemes)) + 2 * hessians + 8 * 4 * largest + 6 * 4 * seq_len * arch.vocab_size
    products = 4 + sum(1 if scheme.activation is None else 2 for scheme in schemes)  # two forwards, one with statistics, one backward
    walks = products * 2.0 * arch.num_linear_params * num_tokens
    searches = sum(2.0 * GRID_SIZE * n * k * (scheme.group_size or k) for scheme in schemes for n, k in shapes) * arch.num_layers
    return peak, walks + searches


def choose(
    spec: Mixed,
    units: Sequence[Unit],
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    outer_bytes: int,
) -> tuple[ModelScheme, dict[str, Any]]:
    """The schemes (the head's not among them), and the facts that explain them.

    Raises:
        UsageError: no choice keeps the budget, or every linear may stay dense.
    """
    times = None
    if spec.budget.of_time:
        named = spec.budget.device
        times = _measured(spec.budget, units, source.arch, ctx) if named is None else _times_of(named, spec.budget.rows, units, source.arch)
    costs = costs_of(spec.budget, units, source.arch, outer_bytes=outer_bytes, times=times)
    losses = _sensitivities(spec, units, source, tokens_NS, ctx, compute_dtype)
    options = [
        [Option(scheme, losses[unit.layer_idx, unit.name][scheme], cost) for scheme, cost in of_unit.items()]
        for unit, of_unit in zip(units, costs.by_unit, strict=True)
    ]
    best = allocate(options, costs.limit)
    chosen = {linear: unit.schemes[pick] for unit, pick in zip(units, best.picks, strict=True) for linear in unit.linears}
    if not any(chosen.values()):
        raise UsageError(
            f"the budget {spec.budget.text} leaves every linear dense: there is nothing to quantize. Leave out the stage instead."
        )
    return commonest(chosen), _facts(spec, units, options, best, costs, source.arch)


def _sensitivities(
    spec: Mixed, units: Sequence[Unit], source: WeightSource, tokens_NS: Tensor, ctx: Context, compute_dtype: torch.dtype
) -> dict[tuple[int, str], dict[str, float]]:
    """(layer, projection) -> scheme -> predicted KL; measured once and kept."""
    kept = ctx.scratch / SENSITIVITIES_NAME
    if not kept.exists():
        schemes = list(dict.fromkeys(scheme for unit in units for scheme in unit.schemes if scheme is not None))
        visitor = Sensitivities(schemes, getattr(torch, source.arch.dtype))
        visit_gradients(source, tokens_NS[: spec.num_samples], visitor, ctx, compute_dtype=compute_dtype)
        write_atomic(kept, canonical_json([[*key, losses] for key, losses in visitor.loss.items()]))
    measured = {(layer, tap): losses for layer, tap, losses in json.loads(kept.read_bytes())}
    tap_of = {name: source.arch.layers[0].linears[linears[0]] for name, linears in PROJECTIONS.items()}
    return {(unit.layer_idx, unit.name): {**measured[unit.layer_idx, tap_of[unit.name]], DENSE: 0.0} for unit in units}


def _asked(units: Sequence[Unit]) -> list[tuple[str, int, int, Scheme | None]]:
    """Every projection's shape in every scheme that it may have, and dense."""
    return list(dict.fromkeys((unit.name, unit.n, unit.k, scheme) for unit in units for scheme in (*unit.schemes, None)))


def _times_of(device: str, rows: int, units: Sequence[Unit], arch: Arch) -> Times:
    table, dtype = latency_table(device), getattr(torch, arch.dtype)
    return {
        (name, n, k, name_of(scheme)): table.linear_us(name, n, k, scheme, rows=rows, dtype=dtype) for name, n, k, scheme in _asked(units)
    }


def _measured(budget: Budget, units: Sequence[Unit], arch: Arch, ctx: Context) -> Times:
    """Times of this device, measured once and kept."""
    kept, device = ctx.scratch / LATENCIES_NAME, torch.device(ctx.device)
    if not kept.exists():
        ctx.progress.say("timing the kernels of each projection and scheme")
        dtype = getattr(torch, arch.dtype) if device.type == "cuda" else torch.float32
        target = Target(device, dtype, max_batch_size=budget.rows, max_step_tokens=128)
        layer_of = {(unit.name, unit.n, unit.k): unit.layer_idx for unit in units}
        rows = []
        for name, n, k, scheme in _asked(units):
            us = linear_time_us(arch, layer_of[name, n, k], name, scheme, rows=budget.rows, target=target)
            rows.append([name, n, k, name_of(scheme), round(us, 2)])
        write_atomic(kept, canonical_json(rows))
    return {(name, n, k, scheme): (us, "measured") for name, n, k, scheme, us in json.loads(kept.read_bytes())}


def _facts(
    spec: Mixed, units: Sequence[Unit], options: Sequence[Sequence[Option]], best: Point, costs: Costs, arch: Arch
) -> dict[str, Any]:
    """What the report shows. Costs are shares of the dense model's, KL in nats a token, as the sensitivities predict it."""
    times, corners = costs.times, frontier(options)
    if len(corners) > MAX_FRONTIER_POINTS:
        step = (len(corners) - 1) / (MAX_FRONTIER_POINTS - 1)
        corners = [corners[round(idx * step)] for idx in range(MAX_FRONTIER_POINTS)]
    everywhere = {
        name: point(options, [next((idx for idx, each in enumerate(of_unit) if each.scheme == name), 0) for of_unit in options])
        for name in spec.schemes
    }

    def said(at: Point) -> dict[str, float]:
        return {"cost": round(at.cost / costs.dense, 6), "kl": _rounded(at.loss)}

    rows = []
    for unit, of_unit, pick in zip(units, options, best.picks, strict=True):
        row: dict[str, Any] = {"layer": unit.layer_idx, "projection": unit.name, "scheme": of_unit[pick].scheme}
        row["kl"] = {each.scheme: _rounded(each.loss) for each in of_unit}
        row["bytes"] = {name_of(scheme): unit.num_bytes(arch, scheme) for scheme in unit.schemes}
        if times is not None:
            row["us"] = {each.scheme: round(times[unit.name, unit.n, unit.k, each.scheme][0], 2) for each in of_unit}
        rows.append(row)
    return {
        "budget": spec.budget.text,
        "cost": "bytes" if times is None else "time",
        "cost_of_dense": costs.dense if times is None else costs.dense / _TICKS_PER_US,
        "limit": round(costs.limit / costs.dense, 6),
        "times_from": [] if times is None else sorted({origin for _, origin in times.values()}),
        "num_samples": spec.num_samples,
        "chosen": said(best),
        "uniform": {name: said(each) for name, each in everywhere.items()},
        "frontier": [said(each) for each in corners],
        "units": rows,
    }


def _rounded(value: float) -> float:
    """Six digits: what lies behind them is noise of the estimate."""
    return float(f"{value:.6g}")
