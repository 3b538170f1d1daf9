"""A slower host, for benchmarks of serving: what a busy or an older machine would add to every launch.

All threads of this process are pinned to one core, and the host spins for 50 microseconds before every launch
that the runtime makes itself: a replay of a CUDA graph, a Triton kernel, a kernel of NVRTC. Kernels take as
long as before. Launches of torch's own ops outside of graphs (copies, cuBLAS products) are not delayed.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compress.kernels.compilers.nvrtc import Function

LAUNCH_S = 50e-6


@contextlib.contextmanager
def slow_host(*, launch_s: float = LAUNCH_S) -> Iterator[None]:
    """Run the block on a slower host."""
    threads = [int(each) for each in os.listdir("/proc/self/task")]
    cores = {each: os.sched_getaffinity(each) for each in threads}
    core = min(cores[os.getpid()])
    originals = [(owner, name, getattr(owner, name)) for owner, name in launch_points()]
    _pin({each: {core} for each in threads})
    for owner, name, launch in originals:
        setattr(owner, name, delayed(launch, launch_s))
    try:
        yield
    finally:
        for owner, name, launch in originals:
            setattr(owner, name, launch)
        _pin(cores)


def launch_points() -> list[tuple[type, str]]:
    """Return the classes and methods through which the runtime launches."""
    points: list[tuple[type, str]] = [(torch.cuda.CUDAGraph, "replay"), (Function, "__call__")]
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return points
    return [*points, (JITFunction, "run")]


def delayed(launch: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a launch before which the host is busy for so long."""

    def call(*args: Any, **options: Any) -> Any:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return launch(*args, **options)

    return call


def _pin(cores: dict[int, set[int]]) -> None:
    for thread, allowed in cores.items():
        with contextlib.suppress(ProcessLookupError):  # this thread has ended
            os.sched_setaffinity(thread, allowed)
