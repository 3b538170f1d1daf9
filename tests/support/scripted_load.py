"""A load target that serves by a script: every token of a request comes a fixed time after the one before."""

from dataclasses import dataclass, field

from compress.validate.contention import CpuTimes
from compress.validate.load.arrivals import Traffic
from compress.validate.load.compare import LoadRow, compare_load
from compress.validate.load.lengths import LengthLaw
from compress.validate.load.objectives import Objectives
from compress.validate.load.served import EngineUse, LoadRun, Sample, ServedRequest
from compress.validate.load.sweep import random_sweep
from compress.validate.load.workload import Workload


@dataclass
class ScriptedTarget:
    """A target whose gap between tokens is `gap_s`, longer by a factor in each run."""

    name: str
    gap_s: float
    factors: tuple[float, ...] = (1.0,)
    turns: list[str] = field(default_factory=list)
    seen: list[Workload] = field(default_factory=list)
    error: str = ""
    backend: str = "compress"
    model: str = "scripted"

    def run(self, workload: Workload) -> LoadRun:
        gap_s = self.gap_s * self.factors[len(self.seen) % len(self.factors)]
        self.turns.append(self.name)
        self.seen.append(workload)
        arrivals_s = workload.arrivals_s or (0.0,) * len(workload.requests)
        served = []
        for idx, (request, arrival_s) in enumerate(zip(workload.requests, arrivals_s, strict=True)):
            times_s = tuple(arrival_s + gap_s * (each + 1) for each in range(request.output_tokens))
            served.append(
                ServedRequest(
                    idx, arrival_s, arrival_s, len(request.prompt), times_s, times_s[-1], error=self.error
                )
            )
        samples = tuple(Sample(each * gap_s, 2, 1, 64, 48) for each in range(5))
        return LoadRun(0.0, tuple(served), EngineUse(128, samples, 0, 0, 0, 1, 0, 0))


def load_rows(
    *targets: ScriptedTarget,
    rates: tuple[float, ...] = (4.0,),
    repeats: int = 3,
    objectives: Objectives | None = None,
) -> list[LoadRow]:
    """Return the rows of targets under one load a rate, with nothing lost to other work."""
    sweep = random_sweep(
        [Traffic(rate) for rate in rates],
        num_requests=8,
        prompt=LengthLaw(12),
        output=LengthLaw(6),
        vocab_size=100,
        seed=0,
    )
    return [
        row
        for load in sweep.loads
        for row in compare_load(
            {each.name: each for each in targets},
            load,
            repeats=repeats,
            objectives=objectives,
            clock=lambda: CpuTimes(),
        )
    ]
