"""Mixed precision as a multiple-choice knapsack: pick one option of each item, so that the total loss is
least within a budget.

    minimise  sum_i loss[i, p(i)]   subject to   sum_i cost[i, p(i)] <= budget

An item is a linear group of one layer. Its options are schemes, each with a loss (`sensitivity.py`) and a
cost in bytes or in hundredths of a microsecond. Losses of second order add up as far as errors of different
items are uncorrelated. Costs are whole numbers, so that a budget is kept exactly.

`allocate` solves the integer program by branch and bound (HiGHS, through scipy). `frontier` solves the
relaxation, in which an item may be split between two options: its optimum over all budgets is one walk along
the lower convex hulls of the items, steepest step first (Sinha, Zoltners, "The multiple-choice knapsack
problem", 1979). A corner of that walk splits no item: it is a best allocation of its own cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from compress.errors import UsageError

T = TypeVar("T")

_TOTAL = 1e6
"""The sum over items of worst loss minus best is scaled to this: the solver stops within 1e-6, which is then
a share of 1e-12."""
_TIE = 1e-3
"""Loss, on the scale of `_TOTAL`, that preferring one of two equally good allocations may cost: a share of
1e-9."""


@dataclass(frozen=True)
class Option:
    """One scheme of one item: its loss in nats of KL a token, and its cost as a whole number."""

    scheme: str
    loss: float
    cost: int


@dataclass(frozen=True)
class Allocation:
    """The index of the option that each item gets, with the sums of their losses and costs."""

    picks: tuple[int, ...]
    loss: float
    cost: int


Items = Sequence[Sequence[Option]]


def allocation(items: Items, picks: Sequence[int]) -> Allocation:
    """Return the allocation in which each item has the option of that index."""
    chosen = [options[pick] for options, pick in zip(items, picks, strict=True)]
    return Allocation(
        tuple(picks), math.fsum(each.loss for each in chosen), sum(each.cost for each in chosen)
    )


def cheapest(items: Items) -> Allocation:
    """Return the allocation of least cost; of options of equal cost it has those of less loss."""
    return allocation(
        items,
        [min(range(len(each)), key=lambda idx: (each[idx].cost, each[idx].loss, idx)) for each in items],
    )


def allocate(items: Items, budget: int) -> Allocation:
    """Return the allocation of least loss within the budget; of equally good ones, that where earlier items
    have the costlier options.

    Raises:
        UsageError: even the cheapest options cost more than the budget.
    """
    least = cheapest(items)
    if least.cost > budget:
        raise UsageError(
            f"the cheapest schemes cost {least.cost:,} in sum, and the budget allows {budget:,}."
        )
    kept = [_undominated(options) for options in items]
    allowed = budget
    while True:
        found = allocation(items, _solve(items, kept, allowed))
        if found.cost <= budget:
            return found
        allowed -= (
            found.cost - budget
        )  # the solver keeps a constraint to a relative 1e-6; here it holds exactly


def frontier(items: Items) -> list[Allocation]:
    """Return best allocations by rising cost, from the cheapest to that of least loss: the corners of the
    relaxed problem."""
    hulls = [_hull(options) for options in items]
    picks = [hull[0] for hull in hulls]
    steps = sorted(
        (-(options[a].loss - options[b].loss) / (options[b].cost - options[a].cost), item, rank)
        for item, (options, hull) in enumerate(zip(items, hulls, strict=True))
        for rank, (a, b) in enumerate(zip(hull, hull[1:], strict=False))
    )
    corners = [allocation(items, picks)]
    for _, item, rank in steps:
        picks[item] = hulls[item][rank + 1]
        corners.append(allocation(items, picks))
    return corners


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Return the values, or `most` of them in even steps with the first and the last among them."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(idx * step)] for idx in range(most)]


def _solve(items: Items, kept: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Return the option of each item among those `kept`, by the integer program."""
    import numpy as np  # here, because scipy takes a third of a second and only this function needs it
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    variables = [(item, idx) for item, options in enumerate(kept) for idx in options]
    costs = [items[item][idx].cost for item, idx in variables]
    divisor = math.gcd(*costs) or 1
    scale = _TOTAL / (
        math.fsum(
            max(each.loss for each in options) - min(each.loss for each in options) for options in items
        )
        or 1.0
    )
    largest = max(max(costs), 1)
    ties = [
        _TIE * costs[at] / largest * (1 + item / len(items)) / (2 * len(items))
        for at, (item, _) in enumerate(variables)
    ]
    goal = [items[item][idx].loss * scale + tie for (item, idx), tie in zip(variables, ties, strict=True)]
    ones = (np.ones(len(variables)), ([item for item, _ in variables], range(len(variables))))
    solved = milp(
        np.array(goal),
        integrality=np.ones(len(variables)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(csr_array(ones, shape=(len(items), len(variables))), 1, 1),
            LinearConstraint(
                np.array([[cost // divisor for cost in costs]], dtype=float), ub=budget // divisor
            ),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert solved.x is not None, f"a knapsack with a solution was not solved: {solved.message}"
    picks = [-1] * len(items)
    for (item, idx), share in zip(variables, solved.x, strict=True):
        if share > 0.5:
            picks[item] = idx
    return picks


def _undominated(options: Sequence[Option]) -> list[int]:
    """Return indices by rising cost and falling loss, without options that cost more and lose as much."""
    order = sorted(
        range(len(options)), key=lambda idx: (options[idx].cost, options[idx].loss, options[idx].scheme)
    )
    kept: list[int] = []
    for idx in order:
        if not kept or options[idx].loss < options[kept[-1]].loss:
            kept.append(idx)
    return kept


def _hull(options: Sequence[Option]) -> list[int]:
    """Return the indices of `_undominated` that lie on the lower convex hull of loss over cost."""
    hull: list[int] = []
    for idx in _undominated(options):
        while len(hull) > 1 and _above(options[hull[-2]], options[hull[-1]], options[idx]):
            hull.pop()
        hull.append(idx)
    return hull


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Return whether the middle lies on or above the line between the others."""
    return (left.loss - middle.loss) * (right.cost - middle.cost) <= (middle.loss - right.loss) * (
        middle.cost - left.cost
    )
