"""What a model costs by the schemes of its projections, in bytes or in time, and what a budget of mixed precision allows.

A unit is a projection (qkv, o, gate_up, down) of one layer: what one kernel multiplies by. Its bytes follow from its scheme, its time is
measured on this device (`choose.py`) or found in a table that ships (`kernels/latency.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from compress.errors import UsageError
from compress.kernels.coverage import linear_shape
from compress.kernels.latency import latency_table
from compress.models.arch import LINEAR_GROUPS, Arch
from compress.quant.scheme import Scheme, name_of
from compress.stages.budget.allocation import Option, allocate
from compress.stages.quantize.mixed import Budget, Mixed, scheme_or_dense

TICKS_PER_US = 100
"""Times are whole hundredths of a microsecond where allocations are compared."""
Times = dict[tuple[str, int, int, str], tuple[float, str]]
"""(projection, n, k, scheme) -> microseconds, and where they are from."""


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
        return [f"layers.{self.layer_idx}.{linear}" for linear in LINEAR_GROUPS[self.name].linears]

    def num_bytes(self, arch: Arch, scheme: Scheme | None) -> int:
        shapes = [
            arch.layers[self.layer_idx].linear_shape(linear, arch.hidden_size)
            for linear in LINEAR_GROUPS[self.name].linears
        ]
        return sum(2 * n * k if scheme is None else scheme.weight_bytes(n, k) for n, k in shapes)


def units_of(spec: Mixed, pinned: Mapping[str, Scheme | None], arch: Arch) -> list[Unit]:
    """Every projection with its choices; `pinned` are linears that overrides decide.

    Raises:
        UsageError: overrides decide some linears of a projection and not others, or differently.
    """
    choices = tuple(scheme_or_dense(name) for name in spec.schemes)
    units = []
    for layer_idx in range(arch.num_layers):
        for name in LINEAR_GROUPS:
            unit = Unit(layer_idx, name, *linear_shape(arch, name, layer_idx=layer_idx), choices)
            said = {linear: pinned[linear] for linear in unit.linears if linear in pinned}
            if said and (len(said) < len(unit.linears) or len(set(said.values())) > 1):
                raise UsageError(
                    f"overrides: {', '.join(unit.linears)} read one input and are one product for every consumer, and overrides decide "
                    f"{', '.join(f'{linear} {name_of(scheme)}' for linear, scheme in said.items())} only. Give all of them one scheme."
                )
            units.append(replace(unit, schemes=(next(iter(said.values())),)) if said else unit)
    return units


@dataclass(frozen=True)
class Costs:
    """What each scheme of each unit costs, all linears dense, and what is allowed: bytes, or hundredths of a microsecond. `times` is None
    where bytes are the budget."""

    by_unit: Sequence[Mapping[str, int]]
    dense: int
    limit: int
    times: Times | None


def costs_of(
    budget: Budget, units: Sequence[Unit], arch: Arch, *, outer_bytes: int, times: Times | None
) -> Costs:
    """Raises UsageError: even the cheapest schemes do not keep the budget."""

    def cost(unit: Unit, scheme: Scheme | None) -> int:
        if times is None:
            return unit.num_bytes(arch, scheme)
        return round(times[unit.name, unit.n, unit.k, name_of(scheme)][0] * TICKS_PER_US)

    by_unit = [{name_of(scheme): cost(unit, scheme) for scheme in unit.schemes} for unit in units]
    dense = sum(cost(unit, None) for unit in units)
    if budget.size_gb is not None:
        limit = int(budget.size_gb * 1e9) - outer_bytes
    elif budget.latency_us is not None:
        limit = int(budget.latency_us * TICKS_PER_US)
    else:
        ratio = budget.size_ratio if budget.size_ratio is not None else budget.latency_ratio
        assert ratio is not None, "a budget has one limit"
        limit = int(ratio * dense)
    least = sum(min(each.values()) for each in by_unit)
    if least > limit:
        outer = (
            f" ({outer_bytes / 1e9:.3f} GB go to embedding and head)" if budget.size_gb is not None else ""
        )
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
    budget = spec.budget
    sizes = [{name_of(scheme): unit.num_bytes(arch, scheme) for scheme in unit.schemes} for unit in units]
    most = sum(max(each.values()) for each in sizes)
    if not budget.of_time:
        return min(most, costs_of(budget, units, arch, outer_bytes=outer_bytes, times=None).limit)
    if budget.device is None:
        return most
    costs = costs_of(
        budget, units, arch, outer_bytes=outer_bytes, times=times_of(budget.device, budget.rows, units, arch)
    )
    by_bytes = [
        [Option(name, -float(of_unit[name]), cost) for name, cost in times.items()]
        for of_unit, times in zip(sizes, costs.by_unit, strict=True)
    ]
    return -round(allocate(by_bytes, costs.limit).loss)


def asked(units: Sequence[Unit]) -> list[tuple[str, int, int, Scheme | None]]:
    """Every projection's shape in every scheme that it may have, and dense."""
    return list(
        dict.fromkeys(
            (unit.name, unit.n, unit.k, scheme) for unit in units for scheme in (*unit.schemes, None)
        )
    )


def times_of(device: str, rows: int, units: Sequence[Unit], arch: Arch) -> Times:
    table = latency_table(device)
    dtype = getattr(torch, arch.dtype)
    return {
        (name, n, k, name_of(scheme)): table.linear_us(name, n, k, scheme, rows=rows, dtype=dtype)
        for name, n, k, scheme in asked(units)
    }
