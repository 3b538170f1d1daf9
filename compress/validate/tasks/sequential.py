"""A test of a drop that may be looked at after every item, and stopped whenever it is certain.

Items come in random order; d is the drop of one (`paired.py`), in [-1, 1]. A gambler who bets the share
L = g / (1 - m) of her capital that the mean drop is below m has, after N items,

    K_g(m) = prod (1 + L (m - d_i))

and if the mean drop is m or more, the expectation of K_g(m) never rises. So does the mean of K_g over a fixed
grid of g in (0, 1). By Ville's inequality (1939) it ever reaches 1 / alpha with probability alpha at most,
at whatever item one stops. The drops m that are not refuted lie below a bound; with wins and losses exchanged
there is one from the other side (arXiv 2010.09686, "hedged capital", with a mixture in place of tuned bets).
K_g depends on the number of items with each drop alone.

Not here: fixed numbers of items, where the intervals of `paired.py` are narrower.
"""

import math
from collections.abc import Mapping

import numpy as np
import scipy.optimize
import scipy.special

from compress.validate.stats import Array, Estimate

_BETS_G = np.concatenate([np.geomspace(1e-3, 0.5, 24), np.linspace(0.55, 0.95, 9)])


def counted(drops_N: Array) -> dict[float, int]:
    """Return how many items have each drop."""
    values, counts = np.unique(drops_N, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def log_capital(counts: Mapping[float, int], drop: float) -> float:
    """Return the logarithm of the capital that was won by betting that the mean drop is below `drop`, which
    is less than 1."""
    drops_X = np.array(list(counts))
    counts_X = np.array(list(counts.values()))
    bets_G1 = (_BETS_G / (1 - drop))[:, None]
    log_G = (counts_X * np.log1p(bets_G1 * (drop - drops_X))).sum(axis=1)
    return float(scipy.special.logsumexp(log_G)) - math.log(len(_BETS_G))


def sequential_estimate(drops_N: Array, *, confidence: float = 0.95) -> Estimate:
    """Return the mean drop with an interval that covers the true one at all items at once, with probability
    `confidence`."""
    counts = counted(drops_N)
    needed = math.log(2 / (1 - confidence))
    mirrored = {-drop: count for drop, count in counts.items()}
    value = math.fsum(drops_N.tolist()) / drops_N.size
    return Estimate(value, -_bound(mirrored, needed), _bound(counts, needed))


def sequential_p_value(drops_N: Array) -> float:
    """Return a two-sided p value of "no difference" that holds at whatever item one stops."""
    counts = counted(drops_N)
    mirrored = {-drop: count for drop, count in counts.items()}
    most = max(log_capital(counts, 0.0), log_capital(mirrored, 0.0))
    return min(1.0, 2 * math.exp(-most))


def _bound(counts: Mapping[float, int], needed: float) -> float:
    """Return the smallest drop that is refuted; 1 where none is."""
    highest = 1 - 1e-9

    def missing(drop: float) -> float:
        return log_capital(counts, drop) - needed

    if missing(highest) < 0:
        return 1.0
    lowest = -1 + 1e-9
    return lowest if missing(lowest) >= 0 else float(scipy.optimize.bisect(missing, lowest, highest))
