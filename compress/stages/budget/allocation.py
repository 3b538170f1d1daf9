"""Mixed precision as a multiple-choice knapsack: one scheme for each unit, the least predicted loss that a budget of cost allows.

    minimise  sum_u loss[u, s(u)]   subject to   sum_u cost[u, s(u)] <= budget

A unit is what one kernel multiplies by; its options are schemes, each with a loss (`sensitivity.py`) and a cost, in bytes or in hundredths
of a microsecond. Losses of second order add up as far as errors of different units are uncorrelated. Costs are whole numbers, so that a
budget is kept exactly.

`allocate` solves the integer program by branch and bound (HiGHS, through scipy). `frontier` is the relaxation, in which a unit may be split
between two options: its optimum over all budgets is one walk along the lower convex hulls of the units, steepest step first (Sinha,
Zoltners, "The multiple-choice knapsack problem", 1979). A corner of that walk splits no unit: it is a best allocation of its own cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compress.errors import UsageError

_TOTAL = 1e6
"""What all losses are scaled to together, from best to worst: the solver stops within 1e-6, which is then a share of 1e-12."""
_TIE = 1e-3
"""Of `_TOTAL`, what preferring one of two equally good allocations may cost: a share of 1e-9."""


@dataclass(frozen=True)
class Option:
    """One scheme of one unit. `loss` in nats of KL a token; `cost` is a whole number."""

    scheme: str
    loss: float
    cost: int


@dataclass(frozen=True)
class Point:
    """An allocation: the option of each unit by index, and the sums."""

    picks: tuple[int, ...]
    loss: float
    cost: int


def point(units: Sequence[Sequence[Option]], picks: Sequence[int]) -> Point:
    chosen = [options[pick] for options, pick in zip(units, picks, strict=True)]
    return Point(tuple(picks), math.fsum(each.loss for each in chosen), sum(each.cost for each in chosen))


def cheapest(units: Sequence[Sequence[Option]]) -> Point:
    """The least cost there is; of options of equal cost the one that loses less."""
    return point(
        units,
        [min(range(len(each)), key=lambda idx: (each[idx].cost, each[idx].loss, idx)) for each in units],
    )


def allocate(units: Sequence[Sequence[Option]], budget: int) -> Point:
    """The least loss within the budget. Of allocations that lose the same, the one where earlier units have the costlier options.

    Raises:
        UsageError: even the cheapest options cost more than the budget.
    """
    least = cheapest(units)
    if least.cost > budget:
        raise UsageError(
            f"the cheapest schemes together cost {least.cost:,} where the budget allows {budget:,}."
        )
    kept = [_undominated(options) for options in units]
    allowed = budget
    while True:
        found = point(units, _solve(units, kept, allowed))
        if found.cost <= budget:
            return found
        allowed -= (
            found.cost - budget
        )  # the solver holds a constraint to a relative 1e-6 or so; here it holds exactly


def frontier(units: Sequence[Sequence[Option]]) -> list[Point]:
    """Best allocations by rising cost, from the cheapest to the one of least loss: the corners of the relaxed problem."""
    hulls = [_hull(options) for options in units]
    picks = [hull[0] for hull in hulls]
    steps = sorted(
        (-(options[a].loss - options[b].loss) / (options[b].cost - options[a].cost), unit, rank)
        for unit, (options, hull) in enumerate(zip(units, hulls, strict=True))
        for rank, (a, b) in enumerate(zip(hull, hull[1:], strict=False))
    )
    points = [point(units, picks)]
    for _, unit, rank in steps:
        picks[unit] = hulls[unit][rank + 1]
        points.append(point(units, picks))
    return points


def _solve(units: Sequence[Sequence[Option]], kept: Sequence[Sequence[int]], budget: int) -> list[int]:
    import numpy as np  # here, because scipy takes a third of a second and only this function needs it
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    variables = [(unit, idx) for unit, options in enumerate(kept) for idx in options]
    costs = [units[unit][idx].cost for unit, idx in variables]
    divisor = math.gcd(*costs) or 1
    scale = _TOTAL / (
        math.fsum(
            max(each.loss for each in options) - min(each.loss for each in options) for options in units
        )
        or 1.0
    )
    largest = max(max(costs), 1)
    ties = [
        _TIE * costs[at] / largest * (1 + unit / len(units)) / (2 * len(units))
        for at, (unit, _) in enumerate(variables)
    ]
    goal = [units[unit][idx].loss * scale + tie for (unit, idx), tie in zip(variables, ties, strict=True)]
    ones = (np.ones(len(variables)), ([unit for unit, _ in variables], range(len(variables))))
    solved = milp(
        np.array(goal),
        integrality=np.ones(len(variables)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(csr_array(ones, shape=(len(units), len(variables))), 1, 1),
            LinearConstraint(
                np.array([[cost // divisor for cost in costs]], dtype=float), ub=budget // divisor
            ),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert solved.x is not None, f"a knapsack with a solution was not solved: {solved.message}"
    picks = [-1] * len(units)
    for (unit, idx), share in zip(variables, solved.x, strict=True):
        if share > 0.5:
            picks[unit] = idx
    return picks


def _undominated(options: Sequence[Option]) -> list[int]:
    """Indices by rising cost and falling loss, without options that cost more and lose as much."""
    order = sorted(
        range(len(options)), key=lambda idx: (options[idx].cost, options[idx].loss, options[idx].scheme)
    )
    kept: list[int] = []
    for idx in order:
        if not kept or options[idx].loss < options[kept[-1]].loss:
            kept.append(idx)
    return kept


def _hull(options: Sequence[Option]) -> list[int]:
    """Those of `_undominated` on the lower convex hull of loss over cost."""
    hull: list[int] = []
    for idx in _undominated(options):
        while len(hull) > 1 and _above(options[hull[-2]], options[hull[-1]], options[idx]):
            hull.pop()
        hull.append(idx)
    return hull


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Whether the middle lies on or above the line between the others."""
    return (left.loss - middle.loss) * (right.cost - middle.cost) <= (middle.loss - right.loss) * (
        middle.cost - left.cost
    )
