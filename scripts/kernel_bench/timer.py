"""Time of work on a device, per launch: CUDA-graph replay over distinct memory, medians with their spread.

A caller gives the same work several times, each on memory of its own, together more than the caches hold. All
of it is captured into one graph, launch after launch as a decode step would have them, so that programmatic
dependent launch overlaps neighbours exactly where it would in serving. Replays are queued without waiting for
the host; events between them are the clock. Without a GPU the same walk is timed by the host's clock.

`alone` puts a plain one-element kernel between launches: it never lets its successor start early, so what is
left after the time of these kernels is taken off is a launch without its neighbours' overlap.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Launch = Callable[[], Any]
COLD_BYTES = {"cuda": 600_000_000, "cpu": 0}
"""Bytes that launches walk over between two visits of one; an H200 has 50 MB of L2. On a CPU this program
only proves that it runs."""
MAX_LAUNCHES = 128
WARM_REPLAYS = 3
SUSTAINED_S = 0.06
"""How long arithmetic is timed at least on CUDA: within milliseconds the power limit takes back the clock
that a short burst gets."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: median over replays, and the 10th and 90th percentile of them; `output` is the
    last launch's."""

    us: float
    us_p10: float
    us_p90: float
    output: Any

    def as_json(self) -> dict[str, float]:
        return {"us": self.us, "us_p10": self.us_p10, "us_p90": self.us_p90}


def num_copies(num_bytes: int, device: torch.device) -> int:
    """Copies of memory of `num_bytes` that make a walk cold, at most `MAX_LAUNCHES`."""
    return max(1, min(MAX_LAUNCHES, -(-COLD_BYTES[device.type] // max(num_bytes, 1))))


def walk(launches: Sequence[Launch], *, at_least: int) -> list[Launch]:
    """The launches, over and over in order, whole walks only."""
    return list(launches) * -(-at_least // len(launches))


def time_launches(
    launches: Sequence[Launch],
    device: torch.device,
    *,
    replays: int,
    in_graph: bool = True,
    sustained: bool = False,
) -> Timing:
    """Run a walk `replays` times, or for `SUSTAINED_S` if that is longer and `sustained`. Outside a graph,
    the host must be quicker than the device for the device's time to be seen."""
    on_gpu = device.type == "cuda"
    replay, last = _captured(launches, device) if on_gpu and in_graph else _eager(launches)
    for _ in range(WARM_REPLAYS):
        replay()
    if on_gpu and sustained:
        replays = max(
            replays, math.ceil(SUSTAINED_S / statistics.median(_event_seconds(replay, WARM_REPLAYS)))
        )
    seconds = _event_seconds(replay, replays) if on_gpu else _clock_seconds(replay, replays)
    each_us = [every * 1e6 / len(launches) for every in seconds]
    deciles = statistics.quantiles(each_us, n=10, method="inclusive") if replays > 1 else each_us * 9
    return Timing(statistics.median(each_us), deciles[0], deciles[8], last[0])


def time_alone(launches: Sequence[Launch], device: torch.device, *, replays: int) -> float:
    """Microseconds of a launch whose neighbours do not overlap it."""
    element = torch.zeros(1, device=device)

    def between() -> Any:
        return element.fill_(1.0)

    both = time_launches([each for launch in launches for each in (launch, between)], device, replays=replays)
    return 2 * both.us - time_launches([between] * len(launches), device, replays=replays).us


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer: what a kernel does not write is seen."""
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = filled


def _captured(launches: Sequence[Launch], device: torch.device) -> tuple[Launch, list[Any]]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for launch in launches[:2]:  # compilation and workspaces come before the capture
            launch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    last: list[Any] = [None]
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            last[0] = launch()
    return graph.replay, last


def _eager(launches: Sequence[Launch]) -> tuple[Launch, list[Any]]:
    last: list[Any] = [None]

    def replay() -> None:
        for launch in launches:
            last[0] = launch()

    return replay, last


def _event_seconds(replay: Launch, replays: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


def _clock_seconds(replay: Launch, replays: int) -> list[float]:
    seconds = []
    for _ in range(replays):
        begin = time.perf_counter()
        replay()
        seconds.append(time.perf_counter() - begin)
    return seconds
