"""The loads of a benchmark on the same requests, from random lengths, a trace or a workload
file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.errors import UsageError
from compress.validate.load.arrivals import Traffic
from compress.validate.load.lengths import LengthLaw
from compress.validate.load.trace import read_trace
from compress.validate.load.workload import RandomWorkload, Workload, replay
from compress.validate.load.workload_file import read_workload

WARMUP_REPEAT = 1 << 30
"""The repeat whose tokens a warm-up has: no counted one."""
Load = Callable[[int], Workload]
"""A function of a repeat: the workload of one load."""


@dataclass(frozen=True)
class Sweep:
    """The loads of a benchmark, and the tokens of the longest request of all, prompt and output."""

    loads: tuple[Load, ...]
    longest: int

    def warmup(self, num_requests: int) -> Workload | None:
        """Return a workload that is not counted; None where it has no requests."""
        return self.loads[0](WARMUP_REPEAT).first(num_requests) if num_requests > 0 else None


def random_sweep(
    traffics: Sequence[Traffic],
    *,
    num_requests: int,
    prompt: LengthLaw,
    output: LengthLaw,
    vocab_size: int,
    seed: int,
    prefix_tokens: int = 0,
) -> Sweep:
    """Return the loads of requests with random lengths and tokens.

    Raises:
        UsageError: the vocabulary is too small to draw from.
    """
    drawn = [
        RandomWorkload(num_requests, prompt, output, vocab_size, traffic, seed, prefix_tokens)
        for traffic in traffics
    ]
    return Sweep(tuple(each.draw for each in drawn), drawn[0].lengths.longest)


def file_sweep(
    path: Path, traffics: Sequence[Traffic], *, num_requests: int | None = None, seed: int = 0
) -> Sweep:
    """Return the loads of a workload file: the same tokens in every repeat.

    Raises:
        UsageError: as `read_workload`; or the file has arrivals of its own and a rate was given too.
    """
    whole = read_workload(path, traffic=traffics[0], seed=seed)
    workload = whole if num_requests is None else whole.cut(num_requests)
    if workload.mode == "trace":
        if any(each.mode == "online" for each in traffics):
            raise UsageError(
                f"the requests of {path} have arrivals of their own; leave the request rate out."
            )
        return Sweep((lambda repeat: workload,), workload.longest)
    return Sweep(tuple(_fixed(workload.under(each, seed=seed)) for each in traffics), workload.longest)


def trace_sweep(
    path: Path,
    rate_scales: Sequence[float],
    *,
    vocab_size: int,
    seed: int,
    num_requests: int | None = None,
    max_concurrency: int | None = None,
) -> Sweep:
    """Return the loads of a trace, one for each factor of its rate.

    Raises:
        UsageError: as `read_trace`.
    """
    traces = [read_trace(path, num_requests=num_requests, rate_scale=each) for each in rate_scales]

    def load(idx: int) -> Load:
        return lambda repeat: replay(
            traces[idx], vocab_size=vocab_size, seed=seed, repeat=repeat, max_concurrency=max_concurrency
        )

    return Sweep(tuple(map(load, range(len(traces)))), traces[0].lengths.longest)


def _fixed(workload: Workload) -> Load:
    return lambda repeat: workload
