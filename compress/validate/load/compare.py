"""Several targets on the same requests, in turn: A B, B A, A B ..., so that what slows the machine down for a
while slows them all and a steady drift cancels.

A row holds the median of each number over the repeats, and the least and the largest of the main ones.
Requests of one run share its disturbances, so the interval of a number is Student's over repeats, and a row
states by `stability.py` whether its repeats agree.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

import numpy as np

from compress.validate.contention import CpuClock, CpuTimes, cpu_clock
from compress.validate.load.metrics import conditions, engine_series, run_metrics
from compress.validate.load.objectives import Objectives
from compress.validate.load.served import LoadRun
from compress.validate.load.target import LoadTarget
from compress.validate.load.workload import Workload
from compress.validate.stability import instability, stability
from compress.validate.stats import Estimate, mean_estimate

Metrics = Mapping[str, Any]
RANGED = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "kv_utilization",
)
"""Numbers whose least and largest value over the repeats a row has."""
LOAD_GATES = {"goodput": "request_goodput", "ttft_ms_p99": "p99_ttft_ms", "itl_ms_p99": "p99_itl_ms"}
"""Metrics that gates may name, and the number that each of them is."""
_JUDGED = {"goodput": "output_throughput", "ttft_ms_p99": "median_ttft_ms", "itl_ms_p99": "median_itl_ms"}
"""The number whose repeats decide whether a metric proves anything: tails differ from repeat to repeat by
chance.
"""


@dataclass(frozen=True)
class LoadRow:
    """One target under one load: what was asked for, the numbers of every repeat in the order in which they
    were measured, and samples of the first repeat's engine.
    """

    target: str
    backend: str
    model: str
    conditions: Metrics
    objectives: Objectives
    repeats: tuple[Metrics, ...]
    series: Sequence[Mapping[str, float]]
    lost_frac: float | None
    date: str

    def median(self, name: str) -> Any:
        """Return the median of a number over the repeats, None where it was not measured; of errors, all."""
        values = [each.get(name) for each in self.repeats]
        if any(isinstance(each, list) for each in values):
            return [text for each in values for text in each or ()]
        numbers = [each for each in values if each is not None]
        if not numbers:
            return None
        return median_low(numbers) if all(isinstance(each, int) for each in numbers) else median(numbers)

    def metrics(self) -> dict[str, Estimate]:
        """Return the numbers that gates may name, with their intervals over repeats."""
        found = {}
        for name, key in LOAD_GATES.items():
            values = [each[key] for each in self.repeats if each.get(key) is not None]
            if len(values) == len(self.repeats):
                found[name] = _estimate(values)
        return found

    def unproven(self) -> dict[str, str]:
        """Return the metrics that the repeats do not prove, each with the reason."""
        reasons = {name: self._instability(key) for name, key in _JUDGED.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def instability(self) -> str:
        """Why the row proves nothing, in words; empty where its repeats agree or there is only one."""
        reasons = [part for each in self.unproven().values() for part in each.split("; ")]
        return "; ".join(dict.fromkeys(reasons))

    def as_json(self) -> dict[str, Any]:
        """Return a flat row under the names of `vllm bench serve`."""
        names = dict.fromkeys(name for each in self.repeats for name in each)
        row: dict[str, Any] = {
            "date": self.date,
            "backend": self.backend,
            "model_id": self.model,
            "target": self.target,
            **self.conditions,
            "goodput_limits_ms": self.objectives.limits,
            "repeats": len(self.repeats),
            **{name: self.median(name) for name in names},
            "unstable": bool(self.instability),
            "instability": self.instability,
        }
        for name in RANGED:
            values = [each[name] for each in self.repeats if each.get(name) is not None]
            if len(values) > 1:
                row[f"{name}_least"] = min(values)
                row[f"{name}_largest"] = max(values)
        return row

    def _instability(self, key: str) -> str:
        values = [each[key] for each in self.repeats]
        if len(values) < 2 or min(values) <= 0:
            return ""
        is_rate = key == _JUDGED["goodput"]
        return instability(stability(values), lost_frac=self.lost_frac, is_rate=is_rate)


def compare_load(
    targets: Mapping[str, LoadTarget],
    workload_of: Callable[[int], Workload],
    *,
    repeats: int,
    objectives: Objectives | None = None,
    warmup: Workload | None = None,
    progress: Callable[[str, int], None] = lambda name, repeat: None,
    clock: CpuClock | None = None,
) -> list[LoadRow]:
    """Return one row a target; all of them serve the workload of a repeat before any serves the next one.

    Args:
        warmup: a workload that is not counted, served by each target before its first repeat.
        progress: called with the name of a target and the repeat before each run.
        clock: the process's use of processors; by default what the system counts.

    Raises:
        UsageError: a target cannot serve the workload.
    """
    limits = Objectives() if objectives is None else objectives
    use = cpu_clock(on_cpu=False) if clock is None else clock
    runs = {name: _TargetRuns([], CpuTimes()) for name in targets}
    date = time.strftime("%Y%m%d-%H%M%S")
    workload = workload_of(0)
    if warmup is not None:
        for target in targets.values():
            target.run(warmup)
    for repeat in range(repeats):
        workload = workload if repeat == 0 else workload_of(repeat)
        for name in list(targets)[:: -1 if repeat % 2 else 1]:
            progress(name, repeat)
            before = use()
            run = targets[name].run(workload)
            runs[name].cpu_times += use() - before
            runs[name].finished.append((workload, run))
    return [
        LoadRow(
            target=name,
            backend=target.backend,
            model=target.model,
            conditions=conditions(runs[name].finished[0][0]),
            objectives=limits,
            repeats=tuple(run_metrics(run, served, limits) for served, run in runs[name].finished),
            series=engine_series(runs[name].finished[0][1]),
            lost_frac=runs[name].cpu_times.lost_frac,
            date=date,
        )
        for name, target in targets.items()
    ]


@dataclass
class _TargetRuns:
    """The runs of one target, and the processor time that they took."""

    finished: list[tuple[Workload, LoadRun]]
    cpu_times: CpuTimes


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over repeats with Student's interval; one repeat has no interval."""
    return (
        Estimate.exact(values[0]) if len(values) == 1 else mean_estimate(np.asarray(values, dtype=np.float64))
    )
