"""When requests arrive.

Open loop: the gaps between arrivals are drawn from a gamma distribution with the shape `burstiness` and the
mean 1 / rate, as `vllm bench serve` draws them. A burstiness of 1 is a Poisson process, less gives bursts,
more approaches even spacing; the variance of a gap is (1 / rate)^2 / burstiness. The first request arrives at
once.

Closed loop: a number of clients, each of which sends its next request when its last one has ended.

Offline: everything arrives at once, which is a closed loop without a limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.errors import UsageError

Mode = Literal["offline", "closed", "online", "trace"]


@dataclass(frozen=True)
class Traffic:
    """The arrival process: `request_rate` a second (infinite: no schedule), and at most `max_concurrency`
    requests at the target, None without a limit. An open loop with a limit holds requests back at the client,
    and their wait counts.

    Raises:
        UsageError: a number is out of range.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or not 0 < self.burstiness < math.inf:
            raise UsageError(
                f"a load of {self.request_rate:g} requests a second with burstiness {self.burstiness:g} "
                "cannot be made: both must be above zero, and burstiness finite."
            )
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"max_concurrency is {self.max_concurrency}; it must be at least 1.")

    @property
    def mode(self) -> Mode:
        """The kind of load."""
        if math.isfinite(self.request_rate):
            return "online"
        return "offline" if self.max_concurrency is None else "closed"

    def arrivals_s(self, num: int, *, seed: int) -> tuple[float, ...] | None:
        """Return when each of `num` requests arrives, in seconds after the first; None where nothing is
        scheduled.
        """
        if not math.isfinite(self.request_rate):
            return None
        rng = np.random.default_rng([seed, 1])  # another stream than that of lengths and tokens
        scale = 1.0 / (self.request_rate * self.burstiness)
        gaps_s = rng.gamma(self.burstiness, scale, max(num - 1, 0))
        return (0.0, *np.cumsum(gaps_s).tolist())[:num]


def realized_rate(arrivals_s: Sequence[float]) -> float:
    """Return the requests a second of a schedule; infinite where all arrive at once."""
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    return (len(arrivals_s) - 1) / span_s if span_s > 0 else math.inf
