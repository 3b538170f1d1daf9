"""Costs of a model by the schemes of its linear groups, in bytes or in time, and the part of them that a
budget of mixed precision allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of
from compress.models.latent import ABSORBED_GROUP
from compress.models.linear_groups import LinearGroup
from compress.quant.scheme import Scheme, name_of
from compress.stages.budget.allocation import Option, allocate
from compress.stages.budget.spec import Budget, Mixed, scheme_or_dense
from compress.stages.budget.tables import Origin, latency_table
from compress.stages.budget.times import TableTimes, Times

TICKS_PER_US = 100
"""Times are whole hundredths of a microsecond where allocations are compared."""


_EXPERTS = "experts"


@dataclass(frozen=True)
class GroupSchemes:
    """The schemes that a linear group of one layer may get, or several groups that get one scheme; a single
    one where an override decides."""

    layer_idx: int
    groups: tuple[LinearGroup, ...]
    schemes: tuple[Scheme | None, ...]

    @property
    def name(self) -> str:
        """The name of the group, or `experts`."""
        return self.groups[0].name if len(self.groups) == 1 else _EXPERTS

    @property
    def linears(self) -> list[str]:
        """Canonical names of the linears of the groups."""
        return [f"layers.{self.layer_idx}.{linear}" for group in self.groups for linear in group.linears]

    def num_bytes(self, arch: Arch, scheme: Scheme | None, *, itemsize: int | None = None) -> int:
        """Return the bytes of the groups' weights in a scheme, dense for None; `itemsize` is as in
        `matrix_bytes`, by default that of the model's dtype."""
        itemsize = itemsize or itemsize_of(arch)
        layer = arch.layers[self.layer_idx]
        shapes = [
            layer.linear_shape(linear, arch.hidden_size) for group in self.groups for linear in group.linears
        ]
        return sum(matrix_bytes(n, k, scheme, itemsize=itemsize) for n, k in shapes)


def matrix_bytes(out_features: int, in_features: int, scheme: Scheme | None, *, itemsize: int) -> int:
    """Return the bytes of a weight [O, I] in a scheme, dense for None; a dense weight and a scale have
    `itemsize` bytes."""
    if scheme is None:
        return itemsize * out_features * in_features
    return scheme.weight_bytes(out_features, in_features, scale_bytes=itemsize)


def schemes_by_group(spec: Mixed, overrides: Mapping[str, Scheme | None], arch: Arch) -> list[GroupSchemes]:
    """Return every linear group of the model with the schemes it may get; `overrides` has the linears that
    overrides decide. The gates, ups and downs of a layer's experts get one scheme, unless an override decides
    some of them: vLLM and the fast kernels of this runtime take one for all.

    Raises:
        UsageError: overrides decide some linears of a group and not others, or differently.
    """
    choices = tuple(scheme_or_dense(name) for name in spec.schemes)
    found: list[GroupSchemes] = []
    for layer_idx, layer in enumerate(arch.layers):
        for group in layer.units:
            each = GroupSchemes(layer_idx, (group,), choices)
            decided = {linear: overrides[linear] for linear in each.linears if linear in overrides}
            if decided and (len(decided) < len(each.linears) or len(set(decided.values())) > 1):
                raise UsageError(
                    f"overrides: {', '.join(each.linears)} read one input and are one product for every "
                    "consumer, and overrides decide "
                    f"{', '.join(f'{linear} {name_of(scheme)}' for linear, scheme in decided.items())} only. "
                    "Give all of them one scheme."
                )
            last = found[-1] if found else None
            if decided:
                found.append(replace(each, schemes=(next(iter(decided.values())),)))
            elif last is not None and _are_experts(last) and _are_experts(each):
                found[-1] = replace(last, groups=(*last.groups, group))
            else:
                found.append(each)
    return found


def _are_experts(each: GroupSchemes) -> bool:
    """Return whether linears are those of a layer's experts, of which no override decides the scheme."""
    return each.name.startswith(f"{_EXPERTS}.") and len(each.schemes) > 1


@dataclass(frozen=True)
class Costs:
    """The cost of each scheme of each linear group, and the most that the chosen ones may cost in sum: bytes,
    or hundredths of a microsecond.

    `dense` is the cost of all groups in 16 bits. `us` has the microseconds of each scheme of each group,
    `origins` where they come from; both are empty where bytes are the budget.
    """

    by_group: Sequence[Mapping[str, int]]
    dense: int
    limit: int
    us: Sequence[Mapping[str, float]] = ()
    origins: frozenset[Origin] = frozenset()


def costs_of(
    budget: Budget, groups: Sequence[GroupSchemes], arch: Arch, *, outer_bytes: int, times: Times | None
) -> Costs:
    """Return the costs of the groups by `times`, or in bytes where that is None; `outer_bytes` are those of
    embedding and head.

    Raises:
        UsageError: even the cheapest schemes exceed the budget.
    """
    if times is None:
        by_group = [
            {name_of(scheme): each.num_bytes(arch, scheme) for scheme in each.schemes} for each in groups
        ]
        costs = Costs(by_group, sum(each.num_bytes(arch, None, itemsize=2) for each in groups), limit=0)
    else:
        costs = _times_of(times, groups, arch)
    costs = replace(costs, limit=_limit(budget, costs.dense, outer_bytes))
    least = sum(min(each.values()) for each in costs.by_group)
    if least > costs.limit:
        outer = (
            f" ({outer_bytes / 1e9:.3f} GB go to embedding and head)" if budget.size_gb is not None else ""
        )
        raise UsageError(
            f"the budget {budget.text} cannot be kept: in the cheapest of the schemes named, the linears of "
            "the layers cost "
            f"{least / costs.dense:.3f} of what they do in 16 bits, and "
            f"{max(costs.limit, 0) / costs.dense:.3f} is allowed{outer}. Allow "
            "more, or name a cheaper scheme."
        )
    return costs


def largest_bytes(
    spec: Mixed, arch: Arch, groups: Sequence[GroupSchemes], outer_bytes: int, *, itemsize: int | None = None
) -> int:
    """Return the most bytes that the layers' linears may take, as far as that follows from shapes and tables;
    `itemsize` is as in `matrix_bytes`, by default that of the model's dtype. A budget of bytes counts scales
    and dense weights in the model's dtype, whatever the format.

    Raises:
        UsageError: even the cheapest schemes exceed the budget.
    """
    budget = spec.budget
    sizes = [
        {name_of(scheme): each.num_bytes(arch, scheme, itemsize=itemsize) for scheme in each.schemes}
        for each in groups
    ]
    most = sum(max(each.values()) for each in sizes)
    times = None
    if budget.is_time:
        if budget.device is None:
            return most
        times = TableTimes(latency_table(budget.device), budget.rows)
    costs = costs_of(budget, groups, arch, outer_bytes=outer_bytes, times=times)
    if times is None and itemsize in (None, itemsize_of(arch)):
        return min(most, costs.limit)
    by_bytes = [
        [Option(name, -float(size[name]), cost) for name, cost in each.items()]
        for size, each in zip(sizes, costs.by_group, strict=True)
    ]
    return -round(allocate(by_bytes, costs.limit).loss)


def _times_of(times: Times, groups: Sequence[GroupSchemes], arch: Arch) -> Costs:
    """Return costs in hundredths of a microsecond, without a limit."""
    us: list[dict[str, float]] = []
    dense = 0
    origins: set[Origin] = set()
    for each in groups:
        found: dict[str, float] = {}
        for scheme in (*each.schemes, None):
            parts = [
                times.linear_us(
                    arch, group, None if group.name == ABSORBED_GROUP else scheme, layer_idx=each.layer_idx
                )
                for group in each.groups
            ]
            found[name_of(scheme)] = sum(time for time, _ in parts)
            origins.update(origin for _, origin in parts)
        dense += round(found[name_of(None)] * TICKS_PER_US)
        us.append({name_of(scheme): found[name_of(scheme)] for scheme in each.schemes})
    by_group = [{name: round(time * TICKS_PER_US) for name, time in each.items()} for each in us]
    return Costs(by_group, dense, limit=0, us=us, origins=frozenset(origins))


def _limit(budget: Budget, dense: int, outer_bytes: int) -> int:
    """Return the most that the linears of the layers may cost; `dense` is what they cost in 16 bits."""
    if budget.size_gb is not None:
        return int(budget.size_gb * 1e9) - outer_bytes
    if budget.latency_us is not None:
        return int(budget.latency_us * TICKS_PER_US)
    ratio = budget.size_ratio if budget.size_ratio is not None else budget.latency_ratio
    assert ratio is not None, "a budget has one limit"
    return int(ratio * dense)
