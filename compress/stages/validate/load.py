"""How source and candidate serve requests that arrive one by one, measured in turn on the same requests."""

from collections.abc import Mapping

from compress.runtime.engine import Engine
from compress.stages.validate.spec import Load
from compress.validate.load.arrivals import Traffic
from compress.validate.load.compare import LoadRow, compare_load
from compress.validate.load.engine_target import EngineTarget
from compress.validate.load.objectives import objectives_of
from compress.validate.load.sweep import random_sweep

SIDES = ("source", "candidate")


def load_models(engines: Mapping[str, Engine], spec: Load, *, seed: int) -> list[LoadRow]:
    """Return the rows of source and candidate."""
    rate = float("inf") if spec.request_rate is None else spec.request_rate
    sweep = random_sweep(
        [Traffic(rate, spec.burstiness, spec.max_concurrency)],
        num_requests=spec.num_requests,
        prompt=spec.law(spec.prompt_tokens),
        output=spec.law(spec.output_tokens),
        vocab_size=engines["candidate"].arch.vocab_size,
        seed=seed,
    )
    targets = {side: EngineTarget(engines[side], side) for side in SIDES}
    return compare_load(
        targets,
        sweep.loads[0],
        repeats=spec.repeats,
        objectives=objectives_of(spec.goodput),
        warmup=sweep.warmup(spec.warmups),
    )
