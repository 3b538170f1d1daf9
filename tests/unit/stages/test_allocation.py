"""The knapsack behind mixed precision, against every allocation and a general solver of its relaxation."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from compress.errors import UsageError
from compress.stages.budget.allocation import Option, allocate, allocation, cheapest, frontier

Items = list[list[Option]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Items, int]:
    numbers = st.integers(1, 40)
    items = [
        [
            Option(f"s{idx}", draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 0.1])), draw(numbers))
            for idx in range(draw(st.integers(1, 4)))
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]
    return items, draw(st.integers(0, 160))


@settings(deadline=None)  # machines are busy
@given(problems())
def test_no_allocation_within_the_budget_loses_less(problem: tuple[Items, int]) -> None:
    items, budget = problem
    every = [
        allocation(items, picks) for picks in itertools.product(*(range(len(options)) for options in items))
    ]
    within = [each for each in every if each.cost <= budget]
    if not within:
        with pytest.raises(UsageError, match="the budget allows"):
            allocate(items, budget)
        return
    found = allocate(items, budget)
    assert found == allocation(items, found.picks)
    assert found.cost <= budget
    assert found.loss == pytest.approx(min(each.loss for each in within), abs=1e-8)


@settings(deadline=None)  # machines are busy
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_options_does_not_decide(problem: tuple[Items, int], shuffle: random.Random) -> None:
    items, budget = problem
    if cheapest(items).cost > budget:
        return
    shuffled = [shuffle.sample(options, len(options)) for options in items]
    first = allocate(items, budget)
    second = allocate(shuffled, budget)
    assert first.cost == second.cost
    assert [items[u][i] for u, i in enumerate(first.picks)] == [
        shuffled[u][i] for u, i in enumerate(second.picks)
    ]


def test_of_equal_units_the_earlier_has_the_costlier_option() -> None:
    items = [[Option("small", 1.0, 1), Option("large", 0.0, 2)]] * 4
    assert allocate(items, 6).picks == (1, 1, 0, 0)


@settings(deadline=None)  # machines are busy
@given(problems())
def test_the_frontier_is_where_a_general_solver_of_the_relaxation_finds_it(
    problem: tuple[Items, int],
) -> None:
    items, _ = problem
    points = frontier(items)
    assert points[0].cost == cheapest(items).cost
    assert points[-1].loss == pytest.approx(sum(min(each.loss for each in options) for options in items))
    assert all(
        left.cost < right.cost and left.loss > right.loss for left, right in itertools.pairwise(points)
    )
    variables = [(u, option) for u, options in enumerate(items) for option in options]
    one_each = np.array([[float(u == item) for u, _ in variables] for item in range(len(items))])
    for left, right in itertools.pairwise([points[0], *points]):
        budget = (left.cost + right.cost) / 2
        relaxed = linprog(
            [option.loss for _, option in variables],
            A_ub=[[option.cost for _, option in variables]],
            b_ub=[budget],
            A_eq=one_each,
            b_eq=np.ones(len(items)),
        )
        assert (left.loss + right.loss) / 2 == pytest.approx(relaxed.fun, abs=1e-7)
        assert allocate(items, right.cost).loss == pytest.approx(
            right.loss, abs=1e-8
        )  # a corner is an optimum of its own budget


def test_a_model_of_eighty_layers_is_solved_exactly_within_its_bytes() -> None:
    draw = random.Random(0)
    bits = {"W4": (33, 1.0), "W8": (64, 0.02), "FP8": (65, 0.05), "dense": (128, 0.0)}
    shapes = (10240 * 8192, 8192 * 8192, 57344 * 8192, 8192 * 28672)
    items = []
    for _ in range(80):
        for size in shapes:
            loss = size * draw.lognormvariate(0, 1.5) * 1e-12
            items.append(
                [
                    Option(name, loss * share * draw.uniform(0.8, 1.2), size * width // 64)
                    for name, (width, share) in bits.items()
                ]
            )
    dense = sum(options[-1].cost for options in items)
    budget = int(0.4 * dense)
    found = allocate(items, budget)
    assert found.cost <= budget
    corners = [each for each in frontier(items) if each.cost <= budget]
    assert found.loss <= corners[-1].loss
    above = next(each for each in frontier(items) if each.cost > budget)
    share = (budget - corners[-1].cost) / (above.cost - corners[-1].cost)
    assert (
        found.loss >= corners[-1].loss + share * (above.loss - corners[-1].loss) - 1e-12
    )  # the relaxation is a lower bound
