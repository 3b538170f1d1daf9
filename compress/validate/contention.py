"""Processor time that a process needed and did not get, from the counters of Linux.

    run     time that its threads ran              /proc/self/task/*/schedstat, first number
    wait    time that they waited for a processor  /proc/self/task/*/schedstat, second number
    stolen  time that the hypervisor gave to other guests, all processors  /proc/stat, `steal`
    busy    time that all processors worked or were stolen                  /proc/stat

    lost = 1 - run / (run + wait) x (1 - stolen / busy)

A process that loses the share x of its time takes 1 / (1 - x) times as long. Where the kernel keeps no such
counters, a CPU's work is compared with the clock on the wall: the thread that steps the engine either
computes or waits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CpuClock = Callable[[], "CpuTimes"]
"""A function that returns the counters up to now."""

_TASKS = Path("/proc/self/task")
_SYSTEM = Path("/proc/stat")
_STEAL = 7
_IDLE = (3, 4)
"""Places in the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, then guests
(counted in user).
"""


@dataclass(frozen=True)
class CpuTimes:
    """Counters at one moment, or the difference of two; `run` and `wait` in nanoseconds, `busy` and `stolen`
    in ticks.
    """

    run: int = 0
    wait: int = 0
    busy: int = 0
    stolen: int = 0

    def __add__(self, other: "CpuTimes") -> "CpuTimes":
        return CpuTimes(
            self.run + other.run, self.wait + other.wait, self.busy + other.busy, self.stolen + other.stolen
        )

    def __sub__(self, other: "CpuTimes") -> "CpuTimes":
        return self + CpuTimes(-other.run, -other.wait, -other.busy, -other.stolen)

    @property
    def lost_frac(self) -> float | None:
        """Share of the needed processor time that this process did not get; None where none was counted."""
        if self.run + self.wait <= 0:
            return None
        stolen_frac = self.stolen / self.busy if self.busy > 0 else 0.0
        return 1 - self.run / (self.run + self.wait) * (1 - stolen_frac)


def cpu_clock(*, on_cpu: bool) -> CpuClock:
    """Return the clock for work on a CPU (`on_cpu`) or on another device, whose waiting host thread proves
    nothing without counters.
    """
    if any(_TASKS.glob("*/schedstat")):
        return _counters
    return _thread_times if on_cpu else CpuTimes


def _counters() -> CpuTimes:
    run = 0
    wait = 0
    for task in _TASKS.iterdir():
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has just ended
        run += int(ran)
        wait += int(waited)
    ticks = [int(each) for each in _SYSTEM.read_text().partition("\n")[0].split()[1:9]]
    return CpuTimes(run, wait, sum(ticks) - sum(ticks[idx] for idx in _IDLE), ticks[_STEAL])


def _thread_times() -> CpuTimes:
    run = time.thread_time_ns()
    return CpuTimes(run, time.perf_counter_ns() - run)
