"""The results of a run: the times of each request's tokens, and samples of what the engine held.

A token has the time at which its bytes were here. Tokens that came in one chunk (one step of an engine that
speculates, one event of a server) have the same time, so gaps between tokens are zero inside a chunk and the
whole wait is before it; the chunks of a request are its distinct times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Times = tuple[float, ...]


@dataclass(frozen=True)
class ServedRequest:
    """One request: seconds of the target's clock.

    `arrival_s` is when the schedule has it, and times count from there; `sent_s` is when the target got it.
    In a closed loop both are the moment at which a client was free. `error` is empty for a request that
    completed. `inferred`: the server did not state how many tokens a chunk has, so that they were divided
    evenly.
    """

    request_idx: int
    arrival_s: float
    sent_s: float
    prompt_tokens: int
    token_times_s: Times
    ended_s: float
    cached_tokens: int = 0
    error: str = ""
    inferred: bool = False

    @property
    def num_chunks(self) -> int:
        """The number of moments at which tokens came."""
        return len(set(self.token_times_s))

    @property
    def gaps_s(self) -> list[float]:
        """The time between each two consecutive tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True)
class Sample:
    """The contents of an engine at a moment."""

    time_s: float
    num_running: int
    num_waiting: int
    reserved_positions: int
    live_tokens: int


@dataclass(frozen=True)
class EngineUse:
    """How an engine's cache was used in one run: samples over time, and counts of the whole run."""

    cache_positions: int
    samples: tuple[Sample, ...]
    prefix_queried: int
    prefix_hits: int
    evictions: int
    preemptions: int
    swapped_out: int
    swapped_in: int

    @property
    def kv_utilization(self) -> float | None:
        """Live tokens over reserved positions, both integrated over time; None where nothing was reserved."""
        live = _integral([(each.time_s, each.live_tokens) for each in self.samples])
        reserved = _integral([(each.time_s, each.reserved_positions) for each in self.samples])
        return live / reserved if reserved > 0 else None

    @property
    def peak_reserved_frac(self) -> float:
        """The largest share of the cache that was reserved."""
        return max((each.reserved_positions for each in self.samples), default=0) / max(
            self.cache_positions, 1
        )

    @property
    def peak_running(self) -> int:
        """The most requests that ran at once."""
        return max((each.num_running for each in self.samples), default=0)

    @property
    def peak_waiting(self) -> int:
        """The longest queue."""
        return max((each.num_waiting for each in self.samples), default=0)


@dataclass(frozen=True)
class LoadRun:
    """One run of a workload on one target. `use` is None where the engine is out of reach; `client_lags_s` is
    how late a client that shares its thread with all requests woke up, sampled through the run.
    """

    started_s: float
    served: tuple[ServedRequest, ...]
    use: EngineUse | None = None
    client_lags_s: Times = ()

    @property
    def duration_s(self) -> float:
        """The seconds from the start to the end of the last request."""
        return max((each.ended_s for each in self.served), default=self.started_s) - self.started_s

    @property
    def completed(self) -> list[ServedRequest]:
        """The requests that were answered."""
        return [each for each in self.served if not each.error]

    @property
    def peak_concurrency(self) -> int:
        """The most requests that were sent and unfinished at once."""
        events = sorted(
            event for each in self.served for event in ((each.sent_s, 1), (each.ended_s, -1))
        )  # at equal times an end comes first
        peak = 0
        now = 0
        for _, change in events:
            now += change
            peak = max(peak, now)
        return peak


def _integral(points: Sequence[tuple[float, int]]) -> float:
    """Return the integral of a step function that keeps each value until the next sample."""
    return sum(value * (later - time_s) for (time_s, value), (later, _) in pairwise(points))
