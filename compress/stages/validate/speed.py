"""How fast an engine serves, and how near that is to what the device allows."""

from compress.models.arch import Arch
from compress.runtime.engine import Engine
from compress.stages.validate.spec import Latency
from compress.validate.latency import LatencyRow, measure_latency
from compress.validate.roofline import RooflineRow, Work, roofline


def time_engine(engine: Engine, spec: Latency, seed: int, bandwidth: float) -> list[LatencyRow]:
    return measure_latency(
        engine,
        batch_sizes=spec.batch_sizes,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        repeats=spec.repeats,
        warmups=spec.warmups,
        vocab_size=engine.arch.vocab_size,
        seed=seed,
        bandwidth_bytes_per_s=bandwidth,
    )


def roofs_of(engine: Engine, rows: list[LatencyRow], bandwidth: float, rate: float) -> list[RooflineRow]:
    work = _work(engine.arch, engine)
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


def _work(arch: Arch, engine: Engine) -> Work:
    return Work(
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        flops_per_token=2 * arch.num_linear_params,
        head_flops=2 * arch.vocab_size * arch.hidden_size,
        attention_flops_per_pair=sum(4 * layer.num_heads * layer.head_dim for layer in arch.layers),
    )
