"""Steps of an engine: the host's share of them, and where the device's time goes, kernel by kernel."""

import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from compress.runtime.engine import Engine
from compress.runtime.request import Request, SamplingParams

_WARM_STEPS = 3
_SHOWN_KERNELS = 40


def queue(engine: Engine, batch_size: int, prompt_tokens: int, output_tokens: int) -> None:
    """Requests of random tokens, none of them served yet."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(engine.arch.vocab_size, (batch_size, prompt_tokens), generator=generator).tolist()
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    for idx, prompt in enumerate(prompts):
        engine.add(Request(f"profiled-{idx}", tuple(prompt), params))


def fill(engine: Engine, batch_size: int, prompt_tokens: int, output_tokens: int) -> None:
    """Bring a batch to steady decoding: prompts done, the first steps behind."""
    queue(engine, batch_size, prompt_tokens, output_tokens)
    chunk = engine.config.max_step_tokens - batch_size  # decodes of those that are ready come first
    for _ in range(-(-batch_size * prompt_tokens // chunk) + _WARM_STEPS):
        engine.step()


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def time_steps(engine: Engine, *, steps: int) -> dict[str, float]:
    """Milliseconds of a step, and its microseconds that are not spent waiting for the device: median, 10th
    and 90th percentile."""
    return _percentiles(_timed(engine, steps))


def time_rounds(
    engine: Engine, batch_size: int, prompt_tokens: int, output_tokens: int, *, rounds: int
) -> dict[str, float]:
    """The same over rounds of fresh requests, half of their tokens: a shared machine may be slow for longer
    than a round takes."""
    times = []
    for _ in range(rounds):
        fill(engine, batch_size, prompt_tokens, output_tokens)
        times += _timed(engine, output_tokens // 2)
        drain(engine)
    return _percentiles(times)


def _timed(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """Of each step the seconds it took, and those of the host."""
    times = []
    for _ in range(steps):
        waited_s = engine.wait_s
        begin = time.perf_counter()
        engine.step()
        wall_s = time.perf_counter() - begin
        times.append((wall_s, wall_s - (engine.wait_s - waited_s)))
    return times


def _percentiles(times: list[tuple[float, float]]) -> dict[str, float]:
    row = {}
    for name, scale, values in (
        ("step_ms", 1e3, [wall_s for wall_s, _ in times]),
        ("host_us", 1e6, [host_s for _, host_s in times]),
    ):
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        row |= {
            f"{name}_p50": statistics.median(values) * scale,
            f"{name}_p10": deciles[0] * scale,
            f"{name}_p90": deciles[-1] * scale,
        }
    return row


def profile_steps(engine: Engine, *, steps: int) -> dict[str, Any]:
    """Per step: wall time, time in which no kernel ran, and each kernel's count, microseconds, those of its
    own and its share of these. On a CPU: torch's ops.

    The profiler slows the host, so the idle time is an upper bound. It also leaves hooks behind: from then on
    the launch of a graph costs the host of this process 0.25 us a kernel, so what times the host comes before
    the first profile. Under programmatic dependent launch a kernel starts before its predecessor ends, and
    its time includes that wait: kernels then add up to more than the step. A kernel's own time is by how much
    later it ends than all before it: those add up to the time in which kernels ran.
    """
    on_gpu = engine.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize(engine.device)
        wall_us = (time.perf_counter() - begin) * 1e6
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
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])[:_SHOWN_KERNELS]
    return {
        "steps": steps,
        "wall_us": wall_us / steps,
        "idle_us": max(0.0, wall_us - covered_us(spans)) / steps,
        "kernels": [
            {
                "name": short_name(name),
                "count": count / steps,
                "us": total_us / steps,
                "own_us": own_us / steps,
                "share": own_us / whole_us,
            }
            for name, (count, total_us, own_us) in ordered
        ],
    }


def covered_us(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: overlapping kernels count once."""
    covered = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def short_name(kernel: str) -> str:
    """A kernel's name without its template and call arguments, which fill lines; what stands before them
    tells kernels apart."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = min((plain.find(each) for each in "<(" if plain.find(each) > 0), default=len(plain))
    return plain[:cut].split("::")[-1] or kernel
