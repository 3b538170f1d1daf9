"""How fast the bundled runtime serves a model's shape, scheme by scheme, against the floor that its bytes
set.

    python -m scripts.bench_runtime --out benchmarks/h200/runtime.json
    python -m scripts.bench_runtime --schemes W4A16_G128 --batch-sizes 1 --baseline

Weights are random and made on the device: speed depends on shapes and formats, not on values. `A+B` is scheme
A with a head in scheme B. Every batch size, context and the time to first token of one long prompt use the
same engine, as a server would. Latency is `validate/latency.py`'s: token-true times, prompts fresh for every
request, warm-up not counted. A step of the engine takes as many tokens as the prompts of the largest batch
have together (`max_step_tokens`, at least 2048; the option sets it): requests that arrive together are
prefilled together, so TPOT holds nobody else's prefill, and TTFT of a batch is the prefill of all of it.
Prompts of `--contexts` that are more than one step holds are prefilled in several, and the TPOT of those done
first then holds the rest. In the rows:

    floor_ms       bytes of a decode step / read bandwidth measured in this run;
                   floor_frac = floor / median TPOT
    curve_ms       the same bytes at what separate launches reach on an H200: 2.8 us for each linear,
                   then 4.16 TB/s
    ttft_floor_ms  arithmetic or bytes of the prefill, whichever is longer, at rates measured in this run
                   (schemes that round inputs to 8 bits: FP8 arithmetic)
    step_ms_p50    a steady decode step, all prompts done; with _p10 and _p90 over the steps of all repeats
    host_us_p50    the host's own time in a steady decode step: the step without its waiting for the
                   device; with _p10 and _p90

A profile of steady steps, and of the long prefill, says which kernels the time went to and how long the
device was idle. Profiles come last, by engines of their own, because the profiler slows every launch that
follows in its process. `--baseline` runs `transformers` on the same shape, eager and with a static cache,
which it compiles on CUDA.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from compress.machine import measure_bandwidth, measure_matmul_rate
from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.quant.scheme import SCHEMES
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.validate.latency import LatencyConditions, LatencyRow, measure_latency
from compress.validate.profile.steps import profile_steps
from compress.validate.roofline import roofline, work_of
from scripts.bench_setup import (
    H200_LAUNCH_BYTES_PER_S,
    H200_LAUNCH_S,
    argument_parser,
    is_h200,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    scheme_text,
    schemes_of,
    write_results,
)
from scripts.kernel_bench.timer import time_launches
from scripts.result_file import decode_kernels
from scripts.step_profile import drain, fill, queue, time_rounds

DENSE = "dense"
DEFAULT_SCHEMES = (DENSE, "FP8_DYNAMIC", "INT8_DYNAMIC", "W4A16_G128", "W4A16_G128+FP8_DYNAMIC")
MIN_STEP_TOKENS = 2048
LINEARS_OF_A_LAYER = 4
_MS = ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99")


class Bench:
    """The conditions of a run and what it has measured so far."""

    def __init__(self, args: argparse.Namespace, name: str, arch: Arch, device: torch.device) -> None:
        self.args = args
        self.name = name
        self.arch = arch
        self.device = device
        self.dtype = model_dtype(device)
        small = device.type == "cpu"
        self.bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if small else None)
        self.matmul_rate = measure_matmul_rate(device, self.dtype, size=256 if small else None)
        self.fp8_rate = (
            _fp8_rate(device) if not small and torch.cuda.get_device_capability(device) >= (8, 9) else None
        )
        self.rows: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []

    def serve(self, scheme: str) -> None:
        """All rows of one scheme, by one engine."""
        args = self.args
        started_s = time.perf_counter()
        engine = self._engine(scheme)
        loaded_s = time.perf_counter() - started_s
        for prompt_tokens in dict.fromkeys((args.prompt_tokens, *args.contexts)):
            for row in self._latency(engine, args.batch_sizes, prompt_tokens, args.output_tokens):
                steady = time_rounds(
                    engine, row.batch_size, prompt_tokens, args.output_tokens, rounds=args.repeats
                )
                self.rows.append(self._row(engine, scheme, row) | steady)
        for row in self._latency(engine, [1], args.ttft_tokens, 2):
            self.rows.append(
                self._row(engine, scheme, row) | {"ttft_floor_ms": self._ttft_floor(engine, scheme, row)}
            )
        print(
            f"{scheme}: loaded in {loaded_s:.1f} s, measured in {time.perf_counter() - started_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    def profile(self, scheme: str) -> None:
        """Where the time of its decode steps and of the long prefill goes."""
        args = self.args
        engine = self._engine(scheme)
        for batch_size in args.batch_sizes:
            fill(engine, batch_size, args.prompt_tokens, args.output_tokens)
            self._profiled(
                engine,
                scheme,
                "decode",
                batch_size,
                args.prompt_tokens,
                steps=min(8, args.output_tokens // 2),
            )
        queue(engine, 1, args.ttft_tokens, 2)
        self._profiled(
            engine,
            scheme,
            "prefill",
            1,
            args.ttft_tokens,
            steps=-(-args.ttft_tokens // engine.config.max_step_tokens),
        )

    def _profiled(
        self, engine: Engine, scheme: str, phase: str, batch_size: int, prompt_tokens: int, *, steps: int
    ) -> None:
        facts = {"scheme": scheme, "phase": phase, "batch_size": batch_size, "prompt_tokens": prompt_tokens}
        self.profiles.append(facts | profile_steps(engine, steps=steps).as_json())
        drain(engine)

    def _engine(self, scheme: str) -> Engine:
        args = self.args
        linears, head = schemes_of(scheme)
        source = RandomSource(
            self.arch,
            device=self.device,
            dtype=self.dtype,
            scheme=linears,
            head_scheme=head,
        )
        longest = max(args.prompt_tokens, *args.contexts, args.ttft_tokens) + args.output_tokens
        config = EngineConfig(
            dtype=self.dtype,
            max_batch_size=max(args.batch_sizes),
            max_model_len=longest,
            kv_format=args.kv_format,
            max_step_tokens=args.max_step_tokens
            or max(MIN_STEP_TOKENS, max(args.batch_sizes) * args.prompt_tokens),
        )
        engine = Engine(source, device=self.device, config=config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return engine

    def _latency(
        self, engine: Engine, batch_sizes: Sequence[int], prompt_tokens: int, output_tokens: int
    ) -> list[LatencyRow]:
        conditions = LatencyConditions(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            repeats=self.args.repeats,
            warmups=1,
            vocab_size=self.arch.vocab_size,
            bandwidth_bytes_per_s=self.bandwidth,
            seed=0,
        )
        return measure_latency(engine, conditions, batch_sizes=batch_sizes)

    def _row(self, engine: Engine, scheme: str, row: LatencyRow) -> dict[str, Any]:
        measured = row.as_json()
        launches = LINEARS_OF_A_LAYER * self.arch.num_layers + 1
        curve_ms = (launches * H200_LAUNCH_S + row.step_bytes / H200_LAUNCH_BYTES_PER_S) * 1e3
        return {
            "tool": "compress",
            "shape": self.name,
            "scheme": _shown(scheme, self.dtype),
            "kv": engine.kv_format.lower(),
            "tp": 1,
            **{name: measured[name] for name in ("batch_size", "prompt_tokens", "output_tokens", "repeats")},
            "max_step_tokens": engine.config.max_step_tokens,
            **{each: measured[each] for name in _MS for each in (name, f"{name}_lower", f"{name}_upper")},
            **{
                name: measured[name]
                for name in ("itl_ms_p99", "output_tokens_per_s", "step_bytes", "floor_ms", "floor_frac")
            },
            "curve_ms": curve_ms if is_h200(self.device) else None,
            "kernels": decode_kernels({"kernels": engine.kernel_report()}),
        }

    def _ttft_floor(self, engine: Engine, scheme: str, row: LatencyRow) -> float:
        """The first token's floor; the head is counted at the same rate, one row of it."""
        linears = SCHEMES.get(scheme.partition("+")[0])
        quantizes = linears is not None and linears.activation is not None
        prefill, _ = roofline(
            work_of(engine),
            batch_size=1,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ttft_ms=row.ttft_ms_p50.value,
            tpot_ms=row.tpot_ms_p50.value,
            bandwidth_bytes_per_s=self.bandwidth,
            flops_per_s=self.fp8_rate if quantizes and self.fp8_rate is not None else self.matmul_rate,
        )
        return prefill.floor_ms


BASELINES: dict[str, dict[str, Any]] = {"eager": {}, "static cache": {"cache_implementation": "static"}}
"""Ways to call `generate` of transformers; a static cache is compiled on CUDA."""


def transformers_rows(
    shape: str,
    arch: Arch,
    device: torch.device,
    *,
    batch_size: int,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    kinds: Sequence[str] = tuple(BASELINES),
) -> Iterator[dict[str, Any]]:
    """`generate` as it comes, and with a static cache: TTFT is a call for one token, TPOT its difference to a
    call for all, a token."""
    import transformers

    config = dict(arch.config)
    dtype = model_dtype(device)
    model_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype).eval()
    prompts = torch.randint(arch.vocab_size, (batch_size, prompt_tokens), device=device)
    for kind, options in ((kind, BASELINES[kind]) for kind in kinds):

        def seconds(num_tokens: int, options: dict[str, Any]) -> float:
            begin = time.perf_counter()
            lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                pad_token_id=0,
                **lengths,
                **options,
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begin

        for num_tokens in (1, output_tokens):
            seconds(num_tokens, options)
        first_s = statistics.median(seconds(1, options) for _ in range(repeats))
        whole_s = statistics.median(seconds(output_tokens, options) for _ in range(repeats))
        yield {
            "tool": f"transformers {transformers.__version__} {kind}",
            "shape": shape,
            "scheme": _shown(DENSE, dtype),
            "tp": 1,
            "batch_size": batch_size,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "repeats": repeats,
            "ttft_ms_p50": first_s * 1e3,
            "tpot_ms_p50": (whole_s - first_s) / (output_tokens - 1) * 1e3,
        }


def _shown(scheme: str, dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    return scheme.replace(DENSE, names[dtype])


def _fp8_rate(device: torch.device, *, size: int = 8192) -> float:
    """FLOPs a second of torch's own FP8 product with a scale a row."""
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones(size, 1, dtype=torch.float32, device=device)
    call = partial(
        torch._scaled_mm, left, right.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return 2 * size**3 / time_launches([call] * 2, device, replays=5, in_graph=False, sustained=True).us * 1e6


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def tables(rows: Sequence[dict[str, Any]], profiles: Sequence[dict[str, Any]]) -> str:
    """Latency, then where the time of a step went."""
    header = [
        "scheme",
        "batch",
        "prompt",
        "TTFT ms",
        "TPOT ms",
        "p95",
        "p99",
        "step ms",
        "floor",
        "floor / TPOT",
        "curve",
        "host us",
    ]
    body = [
        [
            row["scheme"] if row["tool"] == "compress" else row["tool"],
            str(row["batch_size"]),
            str(row["prompt_tokens"]),
            f"{row['ttft_ms_p50']:.2f}"
            + (f" (floor {row['ttft_floor_ms']:.1f})" if "ttft_floor_ms" in row else ""),
            *(
                _number(row.get(name))
                for name in ("tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99", "step_ms_p50", "floor_ms")
            ),
            f"{row['floor_frac']:.0%}" if "floor_frac" in row else "",
            _number(row.get("curve_ms")),
            f"{row['host_us_p50']:.0f}" if "host_us_p50" in row else "",
        ]
        for row in rows
    ]
    blocks = [markdown(header, body)]
    for each in profiles:
        lines = [
            [kernel["name"], f"{kernel['count']:.1f}", f"{kernel['own_us']:.1f}", f"{kernel['share']:.1%}"]
            for kernel in each["kernels"][:12]
        ]
        what = (
            f"{each['scheme']}, {each['phase']} of batch {each['batch_size']}, prompt {each['prompt_tokens']}"
        )
        title = f"{what}: step {each['wall_us']:.0f} us, device idle {each['idle_us']:.0f} us"
        blocks.append(f"{title}\n{markdown(['kernel', 'a step', 'us', 'share'], lines)}")
    return "\n\n".join(blocks)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--schemes",
        nargs="+",
        type=scheme_text,
        default=list(DEFAULT_SCHEMES),
        help=f"'{DENSE}' is the dtype of the model; A+B: head in B",
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--contexts", nargs="*", type=int, default=[], help="further prompt lengths to measure"
    )
    parser.add_argument(
        "--ttft-tokens", type=int, default=2048, help="prompt of the time-to-first-token row, batch 1"
    )
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        default=None,
        help="of prefill in one step; by default all prompts of a batch",
    )
    parser.add_argument("--kv-format", default=None, help="of the cache; the model's dtype by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baseline", action="store_true", help="also run transformers on the same shape")
    return parse_arguments(parser, lambda document: tables(document["rows"], document.get("profiles", [])))


def main() -> None:
    args = arguments()
    name, arch = read_arch(args.model)
    bench = Bench(args, name, arch, pick_device())
    try:
        for scheme in args.schemes:
            bench.serve(scheme)
            release_memory()
        if args.baseline:
            lengths = {
                "prompt_tokens": args.prompt_tokens,
                "output_tokens": args.output_tokens,
                "repeats": args.repeats,
            }
            bench.rows += transformers_rows(
                name, arch, bench.device, batch_size=min(args.batch_sizes), **lengths
            )
            release_memory()
        for scheme in args.schemes:
            bench.profile(scheme)
            release_memory()
    finally:  # what was measured before a failure is kept
        if args.out is not None:
            rates = {
                "bandwidth_bytes_per_s": bench.bandwidth,
                "matmul_flops_per_s": bench.matmul_rate,
                "fp8_flops_per_s": bench.fp8_rate,
            }
            write_results(
                args.out,
                bench.rows,
                device=bench.device,
                commit=args.commit,
                facts={**rates, "profiles": bench.profiles},
            )
        print(tables(bench.rows, bench.profiles))


if __name__ == "__main__":
    main()
