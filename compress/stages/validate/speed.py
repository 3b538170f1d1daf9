"""How fast the models serve, measured in turn, and how near that is to what the device allows."""

from collections.abc import Callable, Mapping

from compress.machine import measure_bandwidth, measure_matmul_rate
from compress.runtime.engine import Engine
from compress.stages.validate.spec import Latency
from compress.validate.latency import LatencyConditions, LatencyRow, compare_latency
from compress.validate.roofline import RooflineRow, roofline, work_of

MIN_REPEATS = 3
"""Repeats after which a measurement may end, if they agree: fewer have no spread worth the name."""


def time_models(
    engines: Mapping[str, Engine], spec: Latency, *, seed: int, progress: Callable[[int], None]
) -> tuple[dict[str, list[LatencyRow]], list[RooflineRow]]:
    """Return the latency rows of each model and the roofline of the candidate.

    A model between source and candidate is timed at the first batch size only. `progress` is called with each
    batch size in turn.
    """
    device = engines["candidate"].device
    bandwidth = measure_bandwidth(device)
    conditions = LatencyConditions(
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        repeats=spec.repeats,
        warmups=spec.warmups,
        vocab_size=engines["candidate"].arch.vocab_size,
        bandwidth_bytes_per_s=bandwidth,
        seed=seed,
        min_repeats=MIN_REPEATS,
    )
    rows: dict[str, list[LatencyRow]] = {name: [] for name in engines}
    for batch_size in spec.batch_sizes:
        progress(batch_size)
        timed = {
            name: engine
            for name, engine in engines.items()
            if name != "dense" or batch_size == spec.batch_sizes[0]
        }
        for name, row in compare_latency(timed, conditions, batch_size=batch_size).items():
            rows[name].append(row)
    rate = measure_matmul_rate(device, engines["candidate"].dtype)
    return rows, _rooflines(engines["candidate"], rows["candidate"], bandwidth, rate)


def _rooflines(engine: Engine, rows: list[LatencyRow], bandwidth: float, rate: float) -> list[RooflineRow]:
    work = work_of(engine)
    return [
        each
        for row in rows
        for each in roofline(
            work,
            batch_size=row.batch_size,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ttft_ms=row.ttft_ms_p50.value,
            tpot_ms=row.tpot_ms_p50.value,
            bandwidth_bytes_per_s=bandwidth,
            flops_per_s=rate,
        )
    ]
