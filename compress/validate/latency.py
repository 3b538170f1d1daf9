"""Latency of the bundled runtime's own serving path: the `Engine.step()` that is timed is the one that serves.

    TTFT   first token known on the host - arrival                    (all requests of a batch arrive together)
    TPOT   (end to end - TTFT) / (n - 1), one value a request
    ITL    the gaps between consecutive tokens, all of them
    floor  bytes that one decode step must move / measured bandwidth: all weights once, and keys and values of every sequence at its
           mean length

Prompts are random tokens, fresh for every request of every repeat, so that nothing can be found in a prefix cache ("cold"). A warm-up
round is a whole round of the same shape: compilation, graph capture and autotuning fall into it and are not counted. Requests of one
repeat share its disturbances, so intervals are taken over repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.errors import CompressError, UsageError
from compress.runtime.request import Request, SamplingParams
from compress.validate.stats import Array, Estimate, quantile_estimate, quantiles

if TYPE_CHECKING:
    from compress.runtime.engine import Engine
    from compress.runtime.request import Finished

_CONDITIONS = ("batch_size", "prompt_tokens", "output_tokens", "repeats", "warmups", "prefix_cache")


@dataclass(frozen=True)
class LatencyRow:
    """One batch size: its conditions and what was measured, times in ms."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    repeats: int
    warmups: int
    prefix_cache: str
    ttft_ms_p50: Estimate
    ttft_ms_p95: Estimate
    tpot_ms_p50: Estimate
    tpot_ms_p95: Estimate
    tpot_ms_p99: Estimate
    itl_ms_p50: float
    itl_ms_p90: float
    itl_ms_p95: float
    itl_ms_p99: float
    output_tokens_per_s: float  # of the whole batch, prefill included, median over repeats
    step_bytes: int
    floor_ms: float
    floor_frac: float  # floor / median TPOT: 1 is the hardware's limit

    def metrics(self) -> dict[str, Estimate]:
        """The numbers that gates may name, each with its interval over repeats where it has one."""
        values = {name: value for name, value in vars(self).items() if name not in _CONDITIONS}
        return {
            name: value if isinstance(value, Estimate) else Estimate.exact(float(value))
            for name, value in values.items()
        }

    def as_json(self) -> dict[str, Any]:
        """A flat row: an interval becomes `<name>_lower` and `<name>_upper` beside `<name>`."""
        row: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Estimate):
                row |= {name: value.value, f"{name}_lower": value.lower, f"{name}_upper": value.upper}
            else:
                row[name] = value
        return row


def measure_latency(
    engine: "Engine",
    *,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    warmups: int,
    vocab_size: int,
    seed: int,
    bandwidth_bytes_per_s: float,
) -> list[LatencyRow]:
    """One row a batch size; `bandwidth_bytes_per_s` is what `machine.measure_bandwidth` measured on the same device.

    Raises:
        UsageError: fewer than two repeats (no uncertainty can be stated) or fewer than two output tokens (TPOT needs a gap).
        CompressError: the engine gave back other requests or other lengths than it was asked for.
    """
    if repeats < 2 or output_tokens < 2:
        raise UsageError(
            f"latency needs repeats >= 2 and output_tokens >= 2; here repeats = {repeats}, output_tokens = {output_tokens}."
        )
    if engine.has_work:
        raise UsageError("the engine still has requests of its own; latency is measured on an idle engine.")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for batch_size in batch_sizes:
        rounds = []
        for _ in range(warmups + repeats):
            prompts = torch.randint(vocab_size, (batch_size, prompt_tokens), generator=generator).tolist()
            rounds.append(_run_batch(engine, prompts, output_tokens=output_tokens, seed=seed))
        context = prompt_tokens + output_tokens / 2
        step_bytes = int(engine.weight_bytes + batch_size * context * engine.kv_bytes_per_token)
        rows.append(
            _row(
                rounds[warmups:],
                warmups=warmups,
                prompt_tokens=prompt_tokens,
                step_bytes=step_bytes,
                floor_ms=step_bytes / bandwidth_bytes_per_s * 1e3,
            )
        )
    return rows


def _run_batch(
    engine: "Engine", prompts: list[list[int]], *, output_tokens: int, seed: int
) -> "list[Finished]":
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=seed, ignore_eos=True)
    requests = [
        Request(id=f"latency-{index}", prompt=tuple(prompt), params=params)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    lengths = {done.id: len(done.token_times_s) for done in finished}
    if lengths != {request.id: output_tokens for request in requests}:
        raise CompressError(
            f"asked the engine for {output_tokens} tokens of each of {len(requests)} requests and got {lengths}; nothing was measured."
        )
    return finished


def _row(
    rounds: "list[list[Finished]]", *, warmups: int, prompt_tokens: int, step_bytes: int, floor_ms: float
) -> LatencyRow:
    times_ms_RBN = (
        np.array([[done.token_times_s for done in batch] for batch in rounds], dtype=np.float64) * 1e3
    )
    arrival_ms_RB = np.array([[done.arrival_s for done in batch] for batch in rounds], dtype=np.float64) * 1e3
    num_repeats, batch_size, output_tokens = times_ms_RBN.shape
    ttft_ms_RB: Array = times_ms_RBN[:, :, 0] - arrival_ms_RB
    tpot_ms_RB: Array = (times_ms_RBN[:, :, -1] - times_ms_RBN[:, :, 0]) / (output_tokens - 1)
    itl_ms_p50, itl_ms_p90, itl_ms_p95, itl_ms_p99 = quantiles(
        np.diff(times_ms_RBN, axis=2), (0.5, 0.9, 0.95, 0.99)
    )
    whole_ms_R = times_ms_RBN.max(axis=(1, 2)) - arrival_ms_RB.min(axis=1)
    tpot_ms_p50 = quantile_estimate(tpot_ms_RB, 0.5)
    return LatencyRow(
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=num_repeats,
        warmups=warmups,
        prefix_cache="cold",
        ttft_ms_p50=quantile_estimate(ttft_ms_RB, 0.5),
        ttft_ms_p95=quantile_estimate(ttft_ms_RB, 0.95),
        tpot_ms_p50=tpot_ms_p50,
        tpot_ms_p95=quantile_estimate(tpot_ms_RB, 0.95),
        tpot_ms_p99=quantile_estimate(tpot_ms_RB, 0.99),
        itl_ms_p50=itl_ms_p50,
        itl_ms_p90=itl_ms_p90,
        itl_ms_p95=itl_ms_p95,
        itl_ms_p99=itl_ms_p99,
        output_tokens_per_s=batch_size * output_tokens / float(np.median(whole_ms_R)) * 1e3,
        step_bytes=step_bytes,
        floor_ms=floor_ms,
        floor_frac=floor_ms / tpot_ms_p50.value,
    )
