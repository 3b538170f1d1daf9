"""The numbers of one run, under the names of the result file of `vllm bench serve`.

    TTFT  first token - arrival
    TPOT  (last token - first token) / (tokens - 1), one value a request
    ITL   the time between two consecutive tokens
    E2EL  last token - arrival

Keys of our own have plain names. Times of failed requests count nowhere; goodput counts requests
that failed as bad.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.validate.load.objectives import Objectives, request_times_ms
from compress.validate.load.served import EngineUse, LoadRun
from compress.validate.load.workload import Workload
from compress.validate.stats import quantiles

TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)
MAX_ERRORS = 5
SERIES_POINTS = 200


def run_metrics(run: LoadRun, workload: Workload, objectives: Objectives) -> dict[str, Any]:
    """Return throughput, the distribution of each time, goodput, and how the engine's cache was used.

    `short_outputs` are completed requests with fewer tokens than asked for: the server ended them itself.
    """
    completed = run.completed
    duration_s = run.duration_s
    input_tokens = sum(each.prompt_tokens for each in completed)
    output_tokens = sum(len(each.token_times_s) for each in completed)

    def rate(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    good = sum(objectives.holds(each) for each in run.served)
    limited = bool(objectives.limits)
    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(run.served) - len(completed),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": rate(len(completed)),
        "request_goodput": rate(good) if limited else None,
        "goodput_frac": good / len(run.served) if limited and run.served else None,
        "output_throughput": rate(output_tokens),
        "total_token_throughput": rate(input_tokens + output_tokens),
        "max_concurrent_requests": run.peak_concurrency,
    }
    times = [request_times_ms(each) for each in completed]
    values = {name: [each[name] for each in times] for name in ("ttft", "tpot", "e2el")}
    found = {name: [each for each in column if each is not None] for name, column in values.items()}
    found["itl"] = [gap * 1e3 for each in completed for gap in each.gaps_s]
    for name in TIMES:
        metrics |= distribution(name, found[name])
    late_ms = [(each.sent_s - each.arrival_s) * 1e3 for each in completed]
    metrics["mean_wait_at_client_ms"] = float(np.mean(late_ms)) if late_ms else 0.0
    metrics["cached_tokens"] = sum(each.cached_tokens for each in completed)
    num_chunks = sum(each.num_chunks for each in completed)
    metrics["tokens_per_chunk"] = output_tokens / num_chunks if num_chunks else 0.0
    metrics["inferred_chunks"] = sum(each.inferred for each in completed)
    metrics["short_outputs"] = sum(
        len(each.token_times_s) < workload.requests[each.request_idx].output_tokens for each in completed
    )
    if run.client_lags_s:
        metrics["p99_client_lag_ms"] = quantiles(run.client_lags_s, (0.99,))[0] * 1e3
    metrics["errors"] = list(dict.fromkeys(each.error for each in run.served if each.error))[:MAX_ERRORS]
    return metrics | ({} if run.use is None else engine_metrics(run.use))


def distribution(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of times in ms; zeros where there are none."""
    values = np.asarray(values_ms if len(values_ms) else [0.0], dtype=np.float64)
    ranked = quantiles(values, [each / 100 for each in PERCENTILES])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": ranked[0],
        f"std_{name}_ms": float(values.std()),
        **{f"p{each}_{name}_ms": value for each, value in zip(PERCENTILES, ranked, strict=True)},
    }


def engine_metrics(use: EngineUse) -> dict[str, Any]:
    """Return how an engine's cache was used."""
    return {
        "kv_utilization": use.kv_utilization,
        "kv_reserved_peak_frac": use.peak_reserved_frac,
        "peak_running": use.peak_running,
        "peak_waiting": use.peak_waiting,
        "prefix_queried_tokens": use.prefix_queried,
        "prefix_hit_tokens": use.prefix_hits,
        "evictions": use.evictions,
        "preemptions": use.preemptions,
        "swapped_out": use.swapped_out,
        "swapped_in": use.swapped_in,
    }


def engine_series(run: LoadRun) -> list[dict[str, float]]:
    """Return samples of the engine over the run for a picture, at most `SERIES_POINTS` of them."""
    if run.use is None:
        return []
    samples = run.use.samples
    stride = max(math.ceil(len(samples) / SERIES_POINTS), 1)
    return [
        {
            "time_s": each.time_s - run.started_s,
            "num_running": each.num_running,
            "num_waiting": each.num_waiting,
            "reserved_frac": each.reserved_positions / max(run.use.cache_positions, 1),
            "live_frac": each.live_tokens / max(run.use.cache_positions, 1),
        }
        for each in samples[::stride]
    ]


def conditions(workload: Workload) -> dict[str, Any]:
    """Return what a run was asked for; a rate without a limit is the text "inf", as JSON has no infinity."""
    rate = workload.request_rate
    return {
        "num_prompts": len(workload.requests),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": workload.traffic.burstiness,
        "max_concurrency": workload.max_concurrency,
        "mode": workload.mode,
        "workload": workload.name,
        "input_tokens_digest": workload.digest,
    }
