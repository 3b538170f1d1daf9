"""Uncertainty of numbers measured on windows of text or on repeated runs.

Tokens inside a window (and requests inside a run) are dependent, so the window is the unit that was sampled,
and every interval here is taken over windows ("clusters"), never over tokens:

- a mean: mean of the window means +- t(n-1) * sd / sqrt(n) (Student), paired by taking differences inside a
  window first;
- a ratio of sums (tokens over steps): linearized (Cochran, Sampling Techniques, 1977, 6.4): the t interval of
  the mean of (a - r b) / mean(b), r being the ratio. With a dozen windows it covers better than a bootstrap
  of percentiles, and needs no seed;
- a quantile: Woodruff's interval (J. Am. Stat. Assoc. 47, 1952): the t interval of P(value <= q), over
  windows, read back through the empirical distribution (never narrower than for independent values). Near the
  tail its upper end is the largest value seen: with few windows a p99.9 is hardly known, and its interval is
  wide.

Not here: tests of one hypothesis. Intervals are what the gates compare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.special

from compress.errors import UsageError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A measured number and its two-sided confidence interval; a number that is known exactly has an interval
    of no width.
    """

    value: float
    lower: float
    upper: float

    @staticmethod
    def exact(value: float) -> "Estimate":
        return Estimate(value, value, value)


def mean_estimate(values_N: Array, *, confidence: float = 0.95) -> Estimate:
    """Return the mean of one value per window, with Student's t interval."""
    mean, error = _mean_and_error(values_N)
    margin = _t_quantile((1 + confidence) / 2, values_N.size) * error
    return Estimate(mean, mean - margin, mean + margin)


def ratio_estimate(above_N: Array, below_N: Array, *, confidence: float = 0.95) -> Estimate:
    """Return sum(above) / sum(below) of one pair per window, with its interval."""
    ratio = math.fsum(above_N.tolist()) / math.fsum(below_N.tolist())
    around = mean_estimate((above_N - ratio * below_N) / below_N.mean(), confidence=confidence)
    return Estimate(ratio, ratio + around.lower, ratio + around.upper)


def quantile_estimate(values_NT: Array, probability: float, *, confidence: float = 0.95) -> Estimate:
    """Return the pooled quantile of N windows of T values each, with Woodruff's interval over windows."""
    ordered = np.sort(values_NT, axis=None)
    value = _quantile(ordered, probability)
    _, clustered = _mean_and_error((values_NT <= value).mean(axis=1))
    independent = math.sqrt(
        probability * (1 - probability) / values_NT.size
    )  # clusters that agree by chance prove no more than this
    margin = _t_quantile((1 + confidence) / 2, values_NT.shape[0]) * max(clustered, independent)
    return Estimate(
        value,
        _quantile(ordered, max(probability - margin, 0.0)),
        _quantile(ordered, min(probability + margin, 1.0)),
    )


def quantiles(values: Sequence[float] | Array, probabilities: Sequence[float]) -> list[float]:
    """Return quantiles by linear interpolation between order statistics (numpy's default, "type 7")."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=None)
    return [_quantile(ordered, probability) for probability in probabilities]


def minimum_detectable_effect(differences_N: Array, *, confidence: float = 0.95, power: float = 0.8) -> float:
    """Return the smallest true mean difference that a paired t test over these windows would report with
    probability `power`.
    """
    _, error = _mean_and_error(differences_N)
    return (
        _t_quantile((1 + confidence) / 2, differences_N.size) + _t_quantile(power, differences_N.size)
    ) * error


def _mean_and_error(values_N: Array) -> tuple[float, float]:
    """Return the mean and its standard error; the sums are exactly rounded, so they do not depend on how the
    work was split.
    """
    num = values_N.size
    if num < 2:
        raise UsageError(
            f"an uncertainty needs at least two windows (or repeats), and there is {num}. Give more text "
            "or shorter windows."
        )
    mean = math.fsum(values_N.tolist()) / num
    variance = math.fsum(((values_N - mean) ** 2).tolist()) / (num - 1)
    return mean, math.sqrt(variance / num)


def _t_quantile(probability: float, num: int) -> float:
    return float(scipy.special.stdtrit(num - 1, probability))


def _quantile(ordered: Array, probability: float) -> float:
    return float(np.quantile(ordered, probability))
