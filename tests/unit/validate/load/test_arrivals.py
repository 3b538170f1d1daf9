"""Arrivals keep the laws of their process, and follow from the seed."""

import math

import numpy as np
import pytest

from compress.errors import UsageError
from compress.validate.load.arrivals import Traffic, realized_rate

NUM = 20_000


def gaps(traffic: Traffic, seed: int = 0) -> np.ndarray:
    arrivals_s = traffic.arrivals_s(NUM, seed=seed)
    assert arrivals_s is not None
    assert len(arrivals_s) == NUM
    assert arrivals_s[0] == 0.0
    return np.diff(arrivals_s)


@pytest.mark.parametrize("rate", [0.5, 40.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(
    rate: float, burstiness: float
) -> None:
    gaps_s = gaps(Traffic(rate, burstiness))
    deviation = 1 / (rate * math.sqrt(burstiness))  # of a gamma with shape b and mean 1 / rate
    assert abs(gaps_s.mean() - 1 / rate) < 4 * deviation / math.sqrt(NUM)
    kurtosis = 3 + 6 / burstiness
    assert abs(gaps_s.var() / deviation**2 - 1) < 4 * math.sqrt((kurtosis - 1) / NUM)


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    gaps_s = gaps(Traffic(10.0))
    beyond = [np.exp(-10.0 * t) for t in (0.05, 0.1, 0.3)]  # P(gap > t) of an exponential law
    for expected, t in zip(beyond, (0.05, 0.1, 0.3), strict=True):
        assert abs((gaps_s > t).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / NUM)


def test_the_same_seed_gives_the_same_arrivals_and_another_does_not() -> None:
    traffic = Traffic(3.0, 0.5)
    assert traffic.arrivals_s(50, seed=7) == traffic.arrivals_s(50, seed=7)
    assert traffic.arrivals_s(50, seed=7) != traffic.arrivals_s(50, seed=8)
    assert traffic.arrivals_s(50, seed=7)[:20] == traffic.arrivals_s(20, seed=7)  # type: ignore[index]


def test_the_mode_follows_from_what_is_given() -> None:
    assert Traffic().mode == "offline"
    assert Traffic(max_concurrency=4).mode == "closed"
    assert Traffic(2.0, max_concurrency=4).mode == "online"
    assert Traffic().arrivals_s(5, seed=0) is None
    assert Traffic(2.0).arrivals_s(0, seed=0) == ()


def test_the_realized_rate_is_that_of_the_schedule() -> None:
    assert realized_rate((0.0, 0.5, 1.0)) == 2.0
    assert realized_rate((0.0, 0.0)) == math.inf
    assert realized_rate(()) == math.inf


@pytest.mark.parametrize(
    "wrong", [{"request_rate": 0.0}, {"request_rate": -1.0}, {"burstiness": 0.0}, {"max_concurrency": 0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        Traffic(**wrong)  # type: ignore[arg-type]
