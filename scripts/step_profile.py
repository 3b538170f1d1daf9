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
    """Medians over steps: milliseconds of one, and the microseconds of it that are not spent waiting for the device."""
    step_ms, host_us = [], []
    for _ in range(steps):
        waited_s, begin = engine.wait_s, time.perf_counter()
        engine.step()
        wall_s = time.perf_counter() - begin
        step_ms.append(wall_s * 1e3)
        host_us.append((wall_s - (engine.wait_s - waited_s)) * 1e6)
    return {"step_ms_p50": statistics.median(step_ms), "host_us_p50": statistics.median(host_us)}


def profile_steps(engine: Engine, *, steps: int) -> dict[str, Any]:
    """Per step: wall time, time in which no kernel ran, and each kernel's count, microseconds and share. On a CPU: torch's ops.

    The profiler slows the host, so the idle time is an upper bound. Under programmatic dependent launch a kernel starts before its
    predecessor ends, and its time includes that wait: kernels then add up to more than the step.
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
    totals: dict[str, tuple[int, float]] = {}
    for event in events:
        count, total_us = totals.get(event.name, (0, 0.0))
        spent_us = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        totals[event.name] = (count + 1, total_us + spent_us)
    whole_us = sum(total_us for _, total_us in totals.values())
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:_SHOWN_KERNELS]
    return {
        "steps": steps,
        "wall_us": wall_us / steps,
        "idle_us": max(0.0, wall_us - covered_us(spans)) / steps,
        "kernels": [
            {"name": short_name(name), "count": count / steps, "us": total_us / steps, "share": total_us / whole_us}
            for name, (count, total_us) in ordered
        ],
    }


def covered_us(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: overlapping kernels count once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def short_name(kernel: str) -> str:
    """A kernel's name without its template and call arguments, which fill lines; what stands before them tells kernels apart."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = min((plain.find(each) for each in "<(" if plain.find(each) > 0), default=len(plain))
    return plain[:cut].split("::")[-1] or kernel
