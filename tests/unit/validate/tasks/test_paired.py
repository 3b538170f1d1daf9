"""Paired statistics against scipy and statsmodels, and against simulated coverage and power."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from compress.validate.tasks.paired import (
    counts_of,
    detectable_and_needed,
    detectable_drop,
    difference_p_value,
    drop_estimate,
    exact_mcnemar,
    holm,
    is_two_valued,
    items_needed,
    score_interval,
)


def drops(lost: int, won: int, same: int) -> np.ndarray:
    return np.repeat([1.0, -1.0, 0.0], [lost, won, same])


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (0, 6), (13, 5), (40, 41), (300, 220)])
def test_mcnemar_is_that_of_statsmodels(lost: int, won: int) -> None:
    theirs = mcnemar([[10, lost], [won, 10]], exact=True).pvalue
    assert exact_mcnemar(lost, won) == pytest.approx(theirs, rel=1e-9)


def test_graded_scores_are_compared_by_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    source, candidate = rng.uniform(size=(2, 40))
    assert not is_two_valued(source - candidate)
    theirs = scipy.stats.ttest_rel(source, candidate).pvalue
    assert difference_p_value(source - candidate) == pytest.approx(theirs, rel=1e-9)


def test_holm_is_that_of_statsmodels() -> None:
    rng = np.random.default_rng(1)
    for num in (1, 2, 7, 30):
        p_values = (rng.uniform(size=num) ** 3).tolist()
        assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1], rel=1e-12)


def test_the_bootstrap_of_graded_scores_is_that_of_scipy() -> None:
    rng = np.random.default_rng(2)
    values = rng.uniform(size=300) - rng.uniform(size=300) ** 2
    estimate = drop_estimate(values, seed=0)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=10_000, rng=rng
    ).confidence_interval
    width = theirs.high - theirs.low
    assert estimate.value == pytest.approx(values.mean(), rel=1e-12)
    assert (estimate.lower, estimate.upper) == pytest.approx((theirs.low, theirs.high), abs=0.05 * width)


def test_the_bootstrap_of_right_and_wrong_is_that_of_scipy() -> None:
    values = drops(60, 40, 900)
    estimate = drop_estimate(values, seed=0)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(3)
    ).confidence_interval
    assert (estimate.lower, estimate.upper) == pytest.approx((theirs.low, theirs.high), abs=0.0015)


@pytest.mark.parametrize(("lost", "won", "num"), [(7, 2, 40), (1, 0, 30), (25, 25, 400)])
def test_the_ends_of_the_score_interval_are_the_drops_that_a_score_test_just_rejects(
    lost: int, won: int, num: int
) -> None:
    """The variance under a drop from shares that maximize the likelihood numerically."""
    for drop in score_interval(lost, won, num):

        def minus_log_likelihood(share: float, drop: float = drop) -> float:
            cells = (share + drop, share, 1 - 2 * share - drop)
            return -sum(
                count * math.log(max(cell, 1e-300))
                for count, cell in zip((lost, won, num - lost - won), cells, strict=True)
                if count
            )

        bounds = (max(0.0, -drop), (1 - drop) / 2)
        share = scipy.optimize.minimize_scalar(
            minus_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}
        ).x
        spread = math.sqrt(num * (2 * share + drop * (1 - drop)))
        assert abs(lost - won - num * drop) / spread == pytest.approx(1.959964, rel=1e-4)


def test_items_that_all_agree_prove_no_more_than_their_number() -> None:
    few, many = (drop_estimate(drops(0, 0, num), seed=0) for num in (20, 2000))
    assert few.value == many.value == 0.0
    assert few.upper == pytest.approx(1.96**2 / (20 + 1.96**2), rel=1e-3)
    assert many.upper < 0.002 < few.upper


@pytest.mark.parametrize(
    ("num", "lost_share", "won_share"), [(300, 0.08, 0.08), (1000, 0.06, 0.04), (4000, 0.03, 0.02)]
)
def test_intervals_of_right_and_wrong_cover_the_truth_as_often_as_promised(
    num: int, lost_share: float, won_share: float
) -> None:
    rng = np.random.default_rng(4)
    shares = [lost_share, won_share, 1 - lost_share - won_share]
    covered = 0
    for seed, (lost, won, same) in enumerate(rng.multinomial(num, shares, size=1000)):
        estimate = drop_estimate(drops(lost, won, same), seed=seed, num_draws=1000)
        covered += estimate.lower <= lost_share - won_share <= estimate.upper
    assert covered / 1000 == pytest.approx(0.95, abs=0.01 + 2 * math.sqrt(0.95 * 0.05 / 1000))


def test_intervals_of_graded_scores_cover_the_truth_as_often_as_promised() -> None:
    rng = np.random.default_rng(5)
    truth = 0.5 - 1 / 3
    covered = 0
    for seed in range(1000):
        estimate = drop_estimate(rng.uniform(size=150) - rng.uniform(size=150) ** 2, seed=seed, num_draws=400)
        covered += estimate.lower <= truth <= estimate.upper
    assert covered / 1000 == pytest.approx(0.95, abs=0.01 + 2 * math.sqrt(0.95 * 0.05 / 1000))


def test_a_detectable_drop_is_found_as_often_as_promised() -> None:
    """Power of the exact test, which is a little less than that of the normal approximation."""
    rng = np.random.default_rng(6)
    drop = detectable_drop(3000, 0.06)
    shares = [(0.06 + drop) / 2, (0.06 - drop) / 2, 0.94]
    found = np.mean(
        [exact_mcnemar(lost, won) < 0.05 for lost, won, _ in rng.multinomial(3000, shares, size=4000)]
    )
    assert found == pytest.approx(0.8, abs=0.035)


def test_items_needed_and_detectable_drop_are_inverse() -> None:
    for num, share in ((200, 0.3), (1000, 0.1), (5000, 0.001)):
        drop = detectable_drop(num, share)
        assert items_needed(drop * 1.0001, share) <= num < items_needed(drop * 0.99, share)
    assert items_needed(0.005, 0.1) > 3 * items_needed(0.01, 0.1)
    assert detectable_drop(5, 0.5) > 0.9


def test_the_detectable_drop_of_graded_scores_falls_with_the_root_of_their_number() -> None:
    rng = np.random.default_rng(7)
    values = rng.uniform(size=2000) - rng.uniform(size=2000)
    effect, needed = detectable_and_needed(values, 0.01)
    assert needed == pytest.approx(2000 * (effect / 0.01) ** 2, rel=1e-3)
    assert effect == pytest.approx(2.8 * values.std() / math.sqrt(2000), rel=0.01)


def test_a_planted_point_in_ten_thousand_items_is_found_and_none_between_a_model_and_itself() -> None:
    rng = np.random.default_rng(8)
    source = rng.uniform(size=10_000) < 0.6
    candidate = source.copy()
    candidate[rng.permutation(np.flatnonzero(source))[:200]] = False
    candidate[rng.permutation(np.flatnonzero(~source))[:100]] = True
    planted = source.astype(float) - candidate
    estimate = drop_estimate(planted, seed=0)
    assert estimate.value == pytest.approx(0.01)
    assert difference_p_value(planted) < 1e-6
    assert 0 < estimate.lower < 0.01 < estimate.upper
    itself = source.astype(float) - source
    assert difference_p_value(itself) == 1.0
    assert counts_of(itself) == (0, 0)
    assert drop_estimate(itself, seed=0).upper < 0.0005
