"""The test that may be looked at after every item: its error rate by simulation, and its laws."""

import math

import numpy as np
import pytest

from compress.validate.tasks.paired import drop_estimate
from compress.validate.tasks.sequential import (
    counted,
    log_capital,
    sequential_estimate,
    sequential_p_value,
)

SHARES = {1.0: 0.05, -1.0: 0.04, 0.0: 0.91}


def test_the_true_drop_is_hardly_ever_refuted_however_often_one_looks() -> None:
    """200 runs of 2000 items, looked at after every 80th."""
    rng = np.random.default_rng(0)
    refuted = 0
    for _ in range(200):
        drops = rng.choice(list(SHARES), p=list(SHARES.values()), size=2000)
        looks = (log_capital(counted(drops[:num]), 0.01) for num in range(80, 2001, 80))
        refuted += max(looks) > math.log(1 / 0.05)
    assert refuted / 200 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_a_fair_bet_wins_nothing_on_average() -> None:
    """The expectation of the capital over all outcomes of three items, where the drop is exactly `m`."""
    mean = sum(drop * share for drop, share in SHARES.items())
    total = 0.0
    for first, p in SHARES.items():
        for second, q in SHARES.items():
            for third, r in SHARES.items():
                total += p * q * r * math.exp(log_capital(counted(np.array([first, second, third])), mean))
    assert total == pytest.approx(1.0, rel=1e-12)


def test_wins_and_losses_exchanged_mirror_the_interval() -> None:
    drops = np.repeat([1.0, -1.0, 0.0], [30, 12, 800])
    there = sequential_estimate(drops)
    back = sequential_estimate(-drops)
    assert (back.value, back.lower, back.upper) == pytest.approx(
        (-there.value, -there.upper, -there.lower), abs=1e-9
    )
    assert there.lower < there.value < there.upper


def test_the_interval_excludes_no_difference_where_the_p_value_is_small() -> None:
    for lost in range(5, 40, 3):
        drops = np.repeat([1.0, -1.0, 0.0], [lost, 10, 700])
        assert (sequential_estimate(drops).lower > 0) == (sequential_p_value(drops) < 0.05)


def test_stopping_at_will_costs_width_and_more_items_narrow_the_interval() -> None:
    few, many = (np.repeat([1.0, -1.0, 0.0], [4 * n, 4 * n, 92 * n]) for n in (5, 50))
    fixed = drop_estimate(many, seed=0)
    open_ended = sequential_estimate(many)
    assert open_ended.lower < fixed.lower < fixed.upper < open_ended.upper
    assert sequential_estimate(few).upper > open_ended.upper


def test_a_clear_drop_is_certain_after_few_items_and_agreement_after_some_hundred() -> None:
    clear = np.tile([1.0, 0.0, 0.0, 0.0], 60)
    assert sequential_estimate(clear).lower > 0
    assert sequential_estimate(np.zeros(800)).upper < 0.01 < sequential_estimate(np.zeros(200)).upper


def test_graded_scores_are_taken_too() -> None:
    drops = np.random.default_rng(1).uniform(0.0, 0.4, size=300)
    found = sequential_estimate(drops)
    assert 0.1 < found.lower < drops.mean() < found.upper < 0.3
