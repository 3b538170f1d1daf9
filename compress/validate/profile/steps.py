"""Steps of an engine under torch's profiler: where the device's time goes, kernel by kernel."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from compress.runtime.engine import Engine
from compress.validate.profile.ops import OpKind, kind_of

_SHOWN_KERNELS = 40


@dataclass(frozen=True)
class KernelTime:
    """A kernel's kind of op, its launches a step, microseconds, those of its own, and its share of all own
    time."""

    name: str
    kind: OpKind
    count: float
    us: float
    own_us: float
    share: float


@dataclass(frozen=True)
class StepProfile:
    """Microseconds of a step: wall time under the profiler, the part of it in which no kernel ran, and those
    of each kernel, the longest first."""

    steps: int
    wall_us: float
    idle_us: float
    kernels: tuple[KernelTime, ...]

    @property
    def busy_us(self) -> float:
        """Time of a step in which kernels ran."""
        return sum(each.own_us for each in self.kernels)

    def as_json(self) -> dict[str, Any]:
        """Return the profile with the kernels that take most."""
        return asdict(self) | {"kernels": [asdict(each) for each in self.kernels[:_SHOWN_KERNELS]]}


def profile_steps(engine: Engine, *, steps: int, trace: Path | None = None) -> StepProfile:
    """Take at most so many steps under the profiler, fewer where the engine runs out of work. On a CPU
    kernels are torch's ops. `trace` is a new file of Chrome's trace events (gzip where its name ends in .gz),
    which https://ui.perfetto.dev opens.

    The profiler slows the host, so the idle time is an upper bound. It also leaves hooks in the driver: from
    then on the launch of a graph costs the host of this process 0.25 us a kernel, so what times the host
    comes before the first profile. Under programmatic dependent launch a kernel starts before its predecessor
    ends, and its time includes that wait: kernels then add up to more than the step. A kernel's own time is
    by how much later it ends than all before it: those add up to the time in which kernels ran.
    """
    on_gpu = engine.device.type == "cuda"
    taken = 0
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        begin = time.perf_counter()
        while taken < steps and engine.has_work:
            engine.step()
            taken += 1
        if on_gpu:
            torch.cuda.synchronize(engine.device)
        wall_us = (time.perf_counter() - begin) * 1e6
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = [event for event in profiler.events() if event.device_type.name == ("CUDA" if on_gpu else "CPU")]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    totals: dict[str, tuple[int, float, float]] = {}
    last_us = float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        count, total_us, total_own_us = totals.get(event.name, (0, 0.0, 0.0))
        if on_gpu:
            spent_us = event.time_range.elapsed_us()
            own_us = max(0.0, event.time_range.end - max(event.time_range.start, last_us))
            last_us = max(last_us, event.time_range.end)
        else:
            spent_us = own_us = event.self_cpu_time_total
        totals[event.name] = (count + 1, total_us + spent_us, total_own_us + own_us)
    whole_us = sum(own_us for _, _, own_us in totals.values())
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])
    steps = max(taken, 1)
    return StepProfile(
        steps=taken,
        wall_us=wall_us / steps,
        idle_us=max(0.0, wall_us - covered_us(spans)) / steps,
        kernels=tuple(
            KernelTime(
                name=short_name(name),
                kind=kind_of(name),
                count=count / steps,
                us=total_us / steps,
                own_us=own_us / steps,
                share=own_us / max(whole_us, 1e-9),
            )
            for name, (count, total_us, own_us) in ordered
        ),
    )


def covered_us(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: overlapping kernels count once."""
    covered = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def short_name(kernel: str) -> str:
    """Return a kernel's name without its template and call arguments, which fill lines; what is before them
    differs between kernels."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = min((plain.find(each) for each in "<(" if plain.find(each) > 0), default=len(plain))
    return plain[:cut].split("::")[-1] or kernel
