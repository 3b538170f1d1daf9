"""Prefill of one prompt and decode steps of a batch: what they wait for, kind of op by kind of op.

    step     = time in which kernels run + gap          the gap is the host's: launches, schedules, reads
    verdict    host, where the gap is a quarter of a step or more; else memory or compute, whichever floor of
               `roofline.py` is higher

A step is timed without the profiler, and kernels under it. On a CPU kernels are torch's ops, and the gap is
the time outside of them.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.request import Request, SamplingParams
from compress.validate.profile.ops import OpKind
from compress.validate.profile.steps import KernelTime, StepProfile, profile_steps
from compress.validate.roofline import Needed, Phase, advise, needed, total, work_of

HOST_SHARE = 0.25
"""Share of a step without kernels from which on the host bounds it."""
MAX_STEPS = 8
_WARM_STEPS = 3
_PREFILLS = 3
_SHOWN_KERNELS = 12
_BLOCK = 128  # the largest block of a cache


@dataclass(frozen=True)
class Rates:
    """Bytes and arithmetic a second that a device was measured to do (`compress/machine.py`)."""

    bandwidth_bytes_per_s: float
    flops_per_s: float

    def bound_ms(self, part: Needed) -> tuple[float, float]:
        """Return the milliseconds of a part's bytes, and those of its arithmetic."""
        return part.bound_ms(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, flops_per_s=self.flops_per_s)


@dataclass(frozen=True)
class OpTime:
    """Own time of the kernels of a kind, its share of the phase, and its point of the roofline: the least
    time of its bytes and arithmetic, and which of both that is. Kinds that need little of either have none.
    """

    kind: OpKind
    ms: float
    share: float
    floor_ms: float | None
    bound: Literal["memory", "compute"] | None


@dataclass(frozen=True)
class PhaseProfile:
    """The prefill of one prompt, or one decode step of a batch. `ms` is its time without the profiler,
    `gap_ms` the part in which no kernel ran."""

    phase: Phase
    batch_size: int
    prompt_tokens: int
    ms: float
    gap_ms: float
    memory_ms: float
    compute_ms: float
    verdict: Literal["memory", "compute", "host"]
    advice: str
    ops: tuple[OpTime, ...]
    kernels: tuple[KernelTime, ...]
    trace: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the profile with the kernels that take most."""
        return asdict(self) | {"kernels": [asdict(each) for each in self.kernels[:_SHOWN_KERNELS]]}


def profile_engine(
    engine: Engine, rates: Rates, *, prompt_tokens: int, batch_size: int, traces: Path | None = None
) -> list[PhaseProfile]:
    """Return the profiles of prefill and decode on an idle engine. Prompts are shorter, and the batch is
    smaller, where the engine holds less. The names of two new files begin with `traces`, and end with
    `.prefill.json.gz` and `.decode.json.gz`.

    Raises:
        UsageError: the engine has requests, or no room for a prompt and a few tokens.
    """
    if engine.has_work:
        raise UsageError("the engine still has requests of its own; finish them before it is profiled.")
    steps = max(1, min(MAX_STEPS, (engine.max_model_len - _WARM_STEPS - 2) // 2))
    speculative = engine.config.speculative
    output_tokens = (2 * steps + _WARM_STEPS + 1) * (1 if speculative is None else speculative.k + 1)
    prompt_tokens = min(prompt_tokens, engine.max_model_len - output_tokens)
    if prompt_tokens < 1:
        raise UsageError(
            f"a profile takes {output_tokens} tokens after a prompt, and this engine holds sequences of "
            f"{engine.max_model_len}; ask for longer requests."
        )
    blocks = -(-(prompt_tokens + output_tokens) // 128) * 128
    batch_size = max(
        1, min(batch_size, engine.config.max_batch_size, engine.counts.cache_positions // blocks)
    )
    profiler = _Profiler(engine, rates, traces)
    return [
        profiler.prefill(prompt_tokens),
        profiler.decode(batch_size, prompt_tokens, output_tokens, steps=steps),
    ]


class _Profiler:
    """Profiles of one engine."""

    def __init__(self, engine: Engine, rates: Rates, traces: Path | None) -> None:
        self._engine = engine
        self._rates = rates
        self._traces = traces
        self._generator = torch.Generator().manual_seed(1)
        self._num_requests = 0

    def prefill(self, prompt_tokens: int) -> PhaseProfile:
        """Return the profile of one prompt, from its arrival to its first token."""
        seconds = []
        for _ in range(2 + _PREFILLS):
            self._add(prompt_tokens, 1)
            seconds += [sum(self._times(prompt_tokens))]
        self._add(prompt_tokens, 1)
        trace = self._trace("prefill")
        found = profile_steps(self._engine, steps=prompt_tokens, trace=trace)
        ms = statistics.median(seconds[2:]) * 1e3
        return self._phase("prefill", 1, prompt_tokens, 0.0, ms, found, found.steps, trace)

    def decode(self, batch_size: int, prompt_tokens: int, output_tokens: int, *, steps: int) -> PhaseProfile:
        """Return the profile of a step in which a whole batch decodes."""
        names = [self._add(prompt_tokens, output_tokens) for _ in range(batch_size)]
        while self._engine.has_work and not all(map(self._engine.tokens_of, names)):
            self._engine.step()
        self._times(_WARM_STEPS)
        seconds = self._times(steps)
        trace = self._trace("decode")
        found = profile_steps(self._engine, steps=steps, trace=trace)
        while self._engine.has_work:
            self._engine.step()
        context = prompt_tokens + output_tokens / 2
        ms = statistics.median(seconds) * 1e3
        return self._phase("decode", batch_size, prompt_tokens, context, ms, found, 1, trace)

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        """Queue a prompt that no other begins like."""
        self._num_requests += 1
        name = f"profile-{self._num_requests}"
        ids = torch.randint(self._engine.arch.vocab_size, (prompt_tokens,), generator=self._generator)
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self._engine.add(Request(name, tuple(ids.tolist()), params))
        self._engine.flush()
        return name

    def _times(self, steps: int) -> list[float]:
        """Take at most so many steps; return their seconds."""
        seconds: list[float] = []
        while len(seconds) < steps and self._engine.has_work:
            begin = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _trace(self, phase: Phase) -> Path | None:
        return None if self._traces is None else Path(f"{self._traces}.{phase}.json.gz")

    def _phase(
        self,
        phase: Phase,
        batch_size: int,
        prompt_tokens: int,
        context: float,
        ms: float,
        found: StepProfile,
        steps: int,
        trace: Path | None,
    ) -> PhaseProfile:
        """Return a phase of so many of the profiled steps."""
        parts = needed(
            work_of(self._engine), phase, batch_size=batch_size, prompt_tokens=prompt_tokens, context=context
        )
        whole = total(parts)
        memory_ms, compute_ms = self._rates.bound_ms(whole)
        gap_ms = max(0.0, ms - found.busy_us * steps / 1e3)
        bound = verdict(gap_ms / ms, memory_ms=memory_ms, compute_ms=compute_ms)
        floors = {"memory_ms": memory_ms, "compute_ms": compute_ms}
        kv_frac = parts["attention"].bytes / max(whole.bytes, 1)
        advice = (
            host_advice(phase, gap_ms / ms)
            if bound == "host"
            else advise(phase, **floors, measured_ms=ms, kv_frac=kv_frac)
        )
        return PhaseProfile(
            phase=phase,
            batch_size=batch_size,
            prompt_tokens=prompt_tokens,
            ms=ms,
            gap_ms=gap_ms,
            memory_ms=memory_ms,
            compute_ms=compute_ms,
            verdict=bound,
            advice=advice,
            ops=self._ops(found, steps, {"products": parts["products"], "attention": parts["attention"]}),
            kernels=found.kernels,
            trace=None if trace is None else str(trace),
        )

    def _ops(self, found: StepProfile, steps: int, parts: dict[OpKind, Needed]) -> tuple[OpTime, ...]:
        """Return the time of each kind of op, the longest first."""
        times: dict[OpKind, float] = {}
        for each in found.kernels:
            times[each.kind] = times.get(each.kind, 0.0) + each.own_us * steps / 1e3
        rows = []
        for kind, ms in sorted(times.items(), key=lambda item: -item[1]):
            floors = self._rates.bound_ms(parts[kind]) if kind in parts else None
            rows.append(
                OpTime(
                    kind=kind,
                    ms=ms,
                    share=ms / max(sum(times.values()), 1e-9),
                    floor_ms=None if floors is None else max(floors),
                    bound=None if floors is None else "memory" if floors[0] >= floors[1] else "compute",
                )
            )
        return tuple(rows)


def verdict(gap_share: float, *, memory_ms: float, compute_ms: float) -> Literal["memory", "compute", "host"]:
    """Return what bounds a phase."""
    if gap_share >= HOST_SHARE:
        return "host"
    return "memory" if memory_ms >= compute_ms else "compute"


def host_advice(phase: Phase, gap_share: float) -> str:
    """Return one sentence of advice for a phase that waits for the host."""
    idle = f"No kernel runs for {100 * gap_share:.0f} % of this time: the host bounds it. "
    if phase == "prefill":
        return idle + (
            "Prefill longer or more prompts a step (max_step_tokens), or give the process a faster core; a "
            "smaller model buys nothing here."
        )
    return idle + (
        "Run more requests at once, speculate for several tokens a step, or give the process a faster core; "
        "a smaller model buys nothing here."
    )
