r"""Decode steps and short prompts on a CPU: quantized linears against the dense source, in alternation.

    GOMP_SPINCOUNT=3000 taskset -c 0,1 python -m scripts.bench_cpu_decode --out benchmarks/cpu_decode.json

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2 \
        GOMP_SPINCOUNT=3000 python -m scripts.bench_cpu_decode --schemes W4A16_G128 INT8_DYNAMIC \
        --out benchmarks/cpu_decode_avx2.json

The second command holds PyTorch's libraries to the instructions of a CPU with AVX2 (MKL has code of its own
for AMD).

Weights are random, of a model's shape; speed depends on shapes and formats, not on values. For each scheme
there are two engines in one process, the source's and the scheme's, both in float32, the dtype of a CPU by
default (`--dtype` for another). Rounds alternate between them, each with fresh requests that are past their
prompts when steps are timed; which engine is first changes from round to round. Another process that wants
the cores slows both. In the rows:

    step_ms, dense_step_ms   a decode step: median, least and 90th percentile of all rounds
    speedup_p50              dense over scheme: the median of the ratios of two medians, one for each round,
                             with _min and _max over the rounds
    ttft_ms, dense_ttft_ms   one step that takes one prompt of `prompt_tokens`: median and least
    linear_bytes             bytes of the linears of layers that the engine holds, for decode and prompts
    kernels                  the linears that serve decode, and those that serve prompts

A quantized model's embedding and tied head stay dense here, as in a checkpoint.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compress.machine import measure_bandwidth
from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.quant.scheme import scheme_named
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.fused_linear import packed_bytes
from scripts.bench_setup import argument_parser, markdown, parse_arguments, read_arch, write_results
from scripts.step_profile import drain, fill, queue

CPU = torch.device("cpu")
VARIABLES = (
    *("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS"),
)
"""What else decides the times: how long threads spin, and instruction sets that libraries are held to."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEMES = ("W4A16_G128", "W4A16_G32", "W8A16", "INT8_DYNAMIC")
DECODE_PROMPT = 16
"""Tokens of the prompts of a decode step, few, so that attention takes no time."""
WARM_STEPS = 3


def engine_of(arch: Arch, scheme: str | None, args: argparse.Namespace) -> Engine:
    source = RandomSource(
        arch,
        device=CPU,
        dtype=torch.bfloat16,
        scheme=None if scheme is None else scheme_named(scheme),
    )
    longest = max(DECODE_PROMPT + WARM_STEPS + args.steps, *args.prompt_tokens) + 2
    config = EngineConfig(
        dtype=DTYPES[args.dtype], max_batch_size=max(args.batch_sizes), max_model_len=longest
    )
    return Engine(source, device=CPU, config=config)


def timed_step(engine: Engine) -> float:
    """Return the milliseconds of one step."""
    begin = time.perf_counter()
    engine.step()
    return (time.perf_counter() - begin) * 1e3


def decode_steps(engine: Engine, batch_size: int, steps: int) -> list[float]:
    """Return the milliseconds of decode steps of fresh requests."""
    fill(engine, batch_size, DECODE_PROMPT, WARM_STEPS + steps + 2)
    times = [timed_step(engine) for _ in range(steps)]
    drain(engine)
    return times


def first_token(engine: Engine, prompt_tokens: int) -> list[float]:
    """Return the milliseconds of the step that takes one fresh prompt."""
    queue(engine, 1, prompt_tokens, 1)
    times = [timed_step(engine)]
    drain(engine)
    return times


def alternate(measure: Any, engines: Sequence[Engine], size: int, rounds: int) -> list[list[list[float]]]:
    """Return what `measure(engine, size)` gives, by engine and round. The first round does not count."""
    times: list[list[list[float]]] = [[] for _ in engines]
    for each in range(rounds + 1):
        for idx in (0, 1) if each % 2 else (1, 0):
            found = measure(engines[idx], size)
            if each:
                times[idx].append(found)
    return times


def compared(name: str, times: list[list[list[float]]]) -> dict[str, Any]:
    """Return the figures of the engine and of the dense one, and their ratio."""
    row: dict[str, Any] = {}
    for prefix, rounds in zip(("dense_", ""), times, strict=True):
        flat = [each for found in rounds for each in found]
        row |= {f"{prefix}{name}_p50": statistics.median(flat), f"{prefix}{name}_min": min(flat)}
        row[f"{prefix}{name}_p90"] = statistics.quantiles(flat, n=10, method="inclusive")[-1]
    dense, coded = ([statistics.median(found) for found in rounds] for rounds in times)
    ratios = [ours / theirs for ours, theirs in zip(dense, coded, strict=True)]
    return row | {
        "speedup_p50": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
    }


def linear_bytes(engine: Engine) -> int:
    """Return the bytes of the linears of all layers, a layout that two kernels share counted once."""
    linears = [each for layer in engine.runner._weights.layers for each in layer.fused_linears]
    packed = [
        bound.packed for each in linears for part in each.slices for bound in (part.decode, part.prefill)
    ]
    return sum(packed_bytes(each) for each in {id(each): each for each in packed}.values())


def kernels_of(engine: Engine) -> dict[str, list[str]]:
    rows = [row for row in engine.kernel_report() if row["op"] == "linear" and row["layer"] is not None]
    return {
        phase: sorted({row["kernel"] for row in rows if row["phase"] == phase})
        for phase in ("decode", "prefill")
    }


def rows_of(scheme: str, dense: Engine, engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one scheme: a row for each batch size, then for each prompt."""
    facts = {
        "scheme": scheme,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "linear_bytes": linear_bytes(engine),
        "dense_linear_bytes": linear_bytes(dense),
        "kernels": kernels_of(engine),
        "dense_kernels": kernels_of(dense),
    }
    engines = (dense, engine)
    rows = []
    for batch_size in args.batch_sizes:
        times = alternate(
            lambda each, size: decode_steps(each, size, args.steps), engines, batch_size, args.rounds
        )
        rows.append({**facts, "batch_size": batch_size, "steps": args.steps, **compared("step_ms", times)})
    for prompt_tokens in args.prompt_tokens:
        times = alternate(first_token, engines, prompt_tokens, args.rounds)
        rows.append({**facts, "prompt_tokens": prompt_tokens, **compared("ttft_ms", times)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "scheme",
        "what",
        "dense ms",
        "least",
        "ms",
        "least",
        "speedup",
        "worst",
        "best",
        "GB of linears",
    ]
    body = []
    for row in rows:
        name = "step_ms" if "batch_size" in row else "ttft_ms"
        what = f"batch {row['batch_size']}" if "batch_size" in row else f"prompt {row['prompt_tokens']}"
        keys = [f"dense_{name}_p50", f"dense_{name}_min", f"{name}_p50", f"{name}_min"]
        ratios = [f"{row[f'speedup_{each}']:.2f}" for each in ("p50", "min", "max")]
        size = f"{row['linear_bytes'] / 1e9:.2f}"
        body.append([row["scheme"], what, *(f"{row[key]:.1f}" for key in keys), *ratios, size])
    return markdown(header, body)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(model="llama-3.2-1b")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the activations")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of each engine, in alternation")
    args = parse_arguments(parser, lambda document: table(document["rows"]), argv)
    name, arch = read_arch(args.model)
    rows: list[dict[str, Any]] = []
    dense = engine_of(arch, None, args)
    for scheme in args.schemes:
        engine = engine_of(arch, scheme, args)
        rows += rows_of(scheme, dense, engine, args)
        print(table(rows), flush=True)
        del engine
        gc.collect()
    if args.out is not None:
        facts = {
            "model": name,
            "threads": torch.get_num_threads(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "bandwidth_bytes_per_s": measure_bandwidth(CPU, size_bytes=1 << 28),
        }
        write_results(Path(args.out), rows, device=CPU, commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()
