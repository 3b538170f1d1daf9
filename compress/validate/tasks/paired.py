"""Statistics of two models that answered the same items.

N items, with a score in [0, 1] of the source and one of the candidate for each; most tasks have right (1) and
wrong (0) only. d_N = source - candidate are the drops. `lost` counts d = 1 (right before, wrong now), `won`
counts d = -1; only these items tell the models apart.

- Exact McNemar test (Psychometrika 12, 1947): under "no difference" `lost` is binomial(lost + won, 1/2).
- Interval of the mean drop: a bootstrap over items (Efron, Ann. Stat. 7, 1979), percentiles. Where scores
  are 0 or 1 it is never narrower than the score interval of Tango (Stat. Med. 17, 1998): a bootstrap of
  items that all agree has no width, and no difference in 20 items proves little.
- Holm's step-down adjustment over tasks (Scand. J. Stat. 6, 1979).
- Power of McNemar's test (Connor, Biometrics 43, 1987): with a share s of items that the models answer
  differently, N items show a drop of D with probability `power` where
  D sqrt(N) = z(1 - alpha/2) sqrt(s) + z(power) sqrt(s - D^2).

Not here: tests that may be looked at after every item (`sequential.py`).
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.special

from compress.validate.stats import Array, Estimate, minimum_detectable_effect

NUM_DRAWS = 10_000
_DRAWS_AT_ONCE = 1 << 22  # item indices held at once: 32 MB
_DROPS = (-1.0, 0.0, 1.0)


def is_two_valued(drops_N: Array) -> bool:
    """Return whether the drops are those of items that are right or wrong."""
    return bool(np.isin(drops_N, _DROPS).all())


def counts_of(drops_N: Array) -> tuple[int, int]:
    """Return how many items lost, and how many won anything."""
    return int((drops_N > 0).sum()), int((drops_N < 0).sum())


def exact_mcnemar(num_lost: int, num_won: int) -> float:
    """Return the two-sided p value of "no difference" from the items that were answered differently."""
    fewer = min(num_lost, num_won)
    return min(1.0, 2 * float(scipy.special.bdtr(fewer, num_lost + num_won, 0.5)))


def difference_p_value(drops_N: Array) -> float:
    """Return the two-sided p value of "no difference": McNemar's for right and wrong, that of the paired t
    test for graded scores."""
    if is_two_valued(drops_N):
        return exact_mcnemar(*counts_of(drops_N))
    num = drops_N.size
    error = float(drops_N.std(ddof=1)) / math.sqrt(num) if num > 1 else math.inf
    if error == 0:
        return 0.0  # the same drop in every item
    return 2 * float(scipy.special.stdtr(num - 1, -abs(float(drops_N.mean())) / error)) if num > 1 else 1.0


def drop_estimate(
    drops_N: Array, *, seed: int, confidence: float = 0.95, num_draws: int = NUM_DRAWS
) -> Estimate:
    """Return the mean drop with its interval.

    Raises:
        ValueError: there is no item.
    """
    if not drops_N.size:
        raise ValueError("no item was answered")
    value = math.fsum(drops_N.tolist()) / drops_N.size
    tails = ((1 - confidence) / 2, (1 + confidence) / 2)
    rng = np.random.default_rng(seed)
    if not is_two_valued(drops_N):
        lower, upper = np.quantile(_resampled_means(drops_N, rng, num_draws), tails)
        return Estimate(value, float(lower), float(upper))
    lost, won = counts_of(drops_N)
    shares = np.array([lost, won, drops_N.size - lost - won]) / drops_N.size
    drawn = rng.multinomial(drops_N.size, shares, size=num_draws)
    lower, upper = np.quantile((drawn[:, 0] - drawn[:, 1]) / drops_N.size, tails)
    score = score_interval(lost, won, drops_N.size, confidence=confidence)
    return Estimate(value, min(float(lower), score[0]), max(float(upper), score[1]))


def score_interval(
    num_lost: int, num_won: int, num_items: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return Tango's interval of the mean drop of right and wrong answers: the drops D that the score test at
    this confidence does not reject."""
    limit = float(scipy.special.ndtri((1 + confidence) / 2))
    value = (num_lost - num_won) / num_items

    def statistic(drop: float) -> float:
        sides = (num_lost - num_won - num_items * drop) ** 2
        spread = num_items * _score_variance(num_lost, num_won, num_items, drop)
        return sides - limit**2 * spread  # no division: the variance is 0 at the ends

    def end(side: float) -> float:
        if value == side:
            return side
        inner = value + 1e-12 * (side - value)
        if statistic(side) <= 0:
            return side
        return float(scipy.optimize.brentq(statistic, inner, side, xtol=1e-12))

    return end(-1.0), end(1.0)


def _score_variance(num_lost: int, num_won: int, num_items: int, drop: float) -> float:
    """Return the variance of one drop under the likeliest shares whose mean drop is `drop`."""
    a = 2 * num_items
    b = -num_lost - num_won + (2 * num_items - num_lost + num_won) * drop
    c = -num_won * drop * (1 - drop)
    won_share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    return max(2 * won_share + drop * (1 - drop), 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for being looked at side by side, in the same order: the smallest of m
    counts m times, the next one m - 1 times, and none less than one before it."""
    order = sorted(range(len(p_values)), key=lambda idx: p_values[idx])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, idx in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[idx]))
        adjusted[idx] = largest
    return adjusted


def items_needed(drop: float, discordant_frac: float, *, confidence: float = 0.95, power: float = 0.8) -> int:
    """Return how many items McNemar's test needs to show a drop with probability `power`, where the models
    answer a share `discordant_frac` of the items differently (at least `drop`, or there is no such drop)."""
    share = max(discordant_frac, drop)
    reach = scipy.special.ndtri((1 + confidence) / 2) * math.sqrt(share)
    reach += scipy.special.ndtri(power) * math.sqrt(max(share - drop**2, 0.0))
    return math.ceil((reach / drop) ** 2)


def detectable_drop(
    num_items: int, discordant_frac: float, *, confidence: float = 0.95, power: float = 0.8
) -> float:
    """Return the smallest drop that so many items show with probability `power`; 1 where they show none."""

    def missing(drop: float) -> float:
        needed = items_needed(drop, discordant_frac, confidence=confidence, power=power)
        return needed - num_items

    if missing(1.0) > 0:
        return 1.0
    return float(scipy.optimize.bisect(missing, 1e-6, 1.0, xtol=1e-9))


def detectable_and_needed(
    drops_N: Array, margin: float, *, confidence: float = 0.95, power: float = 0.8
) -> tuple[float, int]:
    """Return the smallest drop that these items show with probability `power`, and how many items would
    show a drop of `margin`."""
    num = drops_N.size
    if is_two_valued(drops_N):
        share = (sum(counts_of(drops_N)) + 1) / (num + 2)  # never 0: agreement of all items may be chance
        rates = {"confidence": confidence, "power": power}
        return detectable_drop(num, share, **rates), items_needed(margin, share, **rates)
    if num < 2:
        return 1.0, items_needed(margin, 1.0, confidence=confidence, power=power)
    effect = min(minimum_detectable_effect(drops_N, confidence=confidence, power=power), 1.0)
    return effect, max(2, math.ceil(num * (effect / margin) ** 2))


def _resampled_means(values_N: Array, rng: np.random.Generator, num_draws: int) -> Array:
    """Return the means of `num_draws` samples of N values, drawn with replacement."""
    num = values_N.size
    at_once = max(1, _DRAWS_AT_ONCE // num)
    means = [
        values_N[rng.integers(0, num, size=(min(at_once, num_draws - start), num))].mean(axis=1)
        for start in range(0, num_draws, at_once)
    ]
    return np.concatenate(means)
