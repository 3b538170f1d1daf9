"""Steps of an engine and the host's share of them."""

import statistics
import time

import torch

from compress.runtime.engine import Engine
from compress.runtime.request import Request, SamplingParams

_WARM_STEPS = 3


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
