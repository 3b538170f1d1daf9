"""Whether repeats of one measurement agree, judged by shares of their own median, so that the law is the same
for fast and slow models.

    spread   90th minus 10th percentile of the repeats / their median
    drift    median of the last half of the repeats / median of the first half - 1 (an odd one is in neither)
    lost     share of the processor time it needed that the process did not get (`contention.py`)

A latency is unstable, and proves nothing, where

    spread > 20 %     by chance alone, the medians of two runs of five differ by 10 % in one pair of four
    |drift| > 10 %    the halves of one run differ by more than that
    lost > 10 %       all times are longer by a tenth or more, even where repeats agree

The three limits have one reason: 10 % is the smallest difference that a latency is read for, and beyond them
the disturbance alone makes one. With normal noise of 3 % a run of five repeats exceeds them once in a
thousand runs. Repeats agree, and no more of them are needed, where spread and drift are at most 5 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compress.validate.stats import Array, quantiles

MAX_SPREAD_FRAC = 0.2
MAX_DRIFT_FRAC = 0.1
MAX_LOST_FRAC = 0.1
AGREE_FRAC = 0.05


@dataclass(frozen=True)
class Stability:
    """How far the repeats of one quantity agree: shares of their median."""

    spread_frac: float
    drift_frac: float

    @property
    def agrees(self) -> bool:
        """Whether more repeats are not needed."""
        return self.spread_frac <= AGREE_FRAC and abs(self.drift_frac) <= AGREE_FRAC


def stability(values_R: Sequence[float] | Array) -> Stability:
    """Return the spread and the drift of at least two repeats, in the order in which they were measured."""
    values = np.asarray(values_R, dtype=np.float64)
    low, median, high = quantiles(values, (0.1, 0.5, 0.9))
    half = values.size // 2
    drift = float(np.median(values[-half:]) / np.median(values[:half])) - 1
    return Stability((high - low) / median, drift)


def instability(found: Stability, *, lost_frac: float | None, is_rate: bool = False) -> str:
    """Return why repeats prove nothing, in words; an empty string where they are stable.

    `lost_frac` is the share of processor time that other work took; None if it was not counted. `is_rate`
    states that the quantity is a rate, of which more is faster, and not a time.
    """
    reasons = []
    if found.spread_frac > MAX_SPREAD_FRAC:
        reasons.append(f"repeats spread over {found.spread_frac * 100:.0f} % of their median")
    if abs(found.drift_frac) > MAX_DRIFT_FRAC:
        faster = "faster" if (found.drift_frac < 0) != is_rate else "slower"
        reasons.append(f"the last repeats were {abs(found.drift_frac) * 100:.0f} % {faster} than the first")
    if lost := lost_processor(lost_frac):
        reasons.append(lost)
    return "; ".join(reasons)


def lost_processor(lost_frac: float | None) -> str:
    """Return how much processor time other work took, in words; an empty string where it was little, or was
    not counted.
    """
    if lost_frac is None or lost_frac <= MAX_LOST_FRAC:
        return ""
    return f"other work took {lost_frac * 100:.0f} % of the processor time"
