"""Intervals against scipy, against simulated coverage, and against the laws of quantiles."""

import math

import numpy as np
import pytest
import scipy.stats

from compress.errors import UsageError
from compress.validate.stats import (
    mean_estimate,
    minimum_detectable_effect,
    quantile_estimate,
    quantiles,
    ratio_estimate,
)


def test_mean_interval_is_students() -> None:
    values = np.random.default_rng(0).lognormal(size=23)
    estimate = mean_estimate(values, confidence=0.9)
    lower, upper = scipy.stats.t.interval(0.9, df=22, loc=values.mean(), scale=scipy.stats.sem(values))
    assert (estimate.value, estimate.lower, estimate.upper) == pytest.approx(
        (values.mean(), lower, upper), rel=1e-12
    )


def test_mean_does_not_depend_on_the_order_of_windows() -> None:
    rng = np.random.default_rng(1)
    values = rng.lognormal(sigma=8, size=1000)
    assert mean_estimate(values) == mean_estimate(rng.permutation(values))


def test_one_window_is_refused_because_it_has_no_uncertainty() -> None:
    with pytest.raises(UsageError, match="at least two"):
        mean_estimate(np.array([1.0]))
    with pytest.raises(UsageError, match="at least two"):
        quantile_estimate(np.ones((1, 100)), 0.5)


def test_quantiles_agree_with_numpy() -> None:
    values = np.random.default_rng(2).normal(size=(7, 11))
    assert quantiles(values, (0.0, 0.5, 0.99, 1.0)) == pytest.approx(
        np.quantile(values, (0.0, 0.5, 0.99, 1.0))
    )


def test_quantile_interval_covers_the_truth_when_windows_are_dependent() -> None:
    """Values share a window effect as large as their own spread: 95 % intervals must still cover about 95 %
    of the time.
    """
    rng = np.random.default_rng(3)
    truth = scipy.stats.norm.ppf(0.9, scale=math.sqrt(2))
    hits = 0
    for _ in range(300):
        values = rng.normal(size=(40, 1)) + rng.normal(size=(40, 50))
        estimate = quantile_estimate(values, 0.9)
        hits += estimate.lower <= truth <= estimate.upper
        assert estimate.lower <= estimate.value <= estimate.upper
    naive_width = 1.96 * math.sqrt(0.9 * 0.1 / 2000)  # in probability, as if the 2000 values were independent
    assert hits / 300 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 300)
    estimate = quantile_estimate(values, 0.9)
    assert (values <= estimate.upper).mean() - (values <= estimate.lower).mean() > 4 * naive_width


def test_quantile_interval_ends_at_the_largest_value_when_the_tail_is_not_resolved() -> None:
    values = np.random.default_rng(4).normal(size=(4, 25))
    assert quantile_estimate(values, 0.999).upper == values.max()


def test_windows_that_agree_by_chance_do_not_give_an_interval_of_no_width() -> None:
    values = np.tile(np.arange(10.0), (3, 1))
    estimate = quantile_estimate(values, 0.5)
    assert estimate.lower < estimate.value < estimate.upper


def test_detectable_effect_is_found_as_often_as_promised() -> None:
    """Simulated power of the paired t test at exactly the effect called detectable for the true spread."""
    rng = np.random.default_rng(5)
    unit = rng.normal(size=20)
    unit = (unit - unit.mean()) / unit.std(ddof=1)
    effect = minimum_detectable_effect(unit, power=0.8)
    found = np.mean(
        [scipy.stats.ttest_1samp(rng.normal(effect, 1, size=20), 0).pvalue < 0.05 for _ in range(2000)]
    )
    assert found == pytest.approx(0.8, abs=0.04)


def test_the_interval_of_a_ratio_is_that_of_a_bootstrap_where_there_are_many_windows() -> None:
    rng = np.random.default_rng(6)
    below = rng.integers(20, 60, size=400).astype(np.float64)
    above = below * rng.uniform(1, 4, size=400)
    estimate = ratio_estimate(above, below)
    drawn = rng.integers(0, 400, size=(4000, 400))
    lower, upper = np.quantile(above[drawn].sum(axis=1) / below[drawn].sum(axis=1), (0.025, 0.975))
    assert estimate.value == pytest.approx(above.sum() / below.sum(), rel=1e-12)
    assert (estimate.lower, estimate.upper) == pytest.approx((lower, upper), abs=0.1 * (upper - lower))


def test_the_interval_of_a_ratio_covers_it_as_often_as_promised_where_there_are_few() -> None:
    """Sixteen prompts; a bootstrap of percentiles covers some 91 % here."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(2000):
        below = rng.integers(20, 60, size=16).astype(np.float64)
        estimate = ratio_estimate(below * rng.uniform(1, 4, size=16), below)
        covered += estimate.lower <= 2.5 <= estimate.upper
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)
