"""What a smaller KV cache gains at a long context: the time of the first token and of those after it, and how
many tokens fit, for each format of the cache.

    python -m scripts.bench_long_context --out benchmarks/h200/long_context.json

Weights are random and made on the device (`models/random_source.py`). Prompts of `--context` random tokens
are prefilled and then decoded together; the time of a token is the median over the decode steps of all
requests, by format and number of requests. `ttft_ms_p50` is the median time to a request's first token;
requests that are sent together wait for one another's prompts. `tokens_per_gib` is how many tokens a GiB of
cache holds.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.quant.scheme import scheme_named
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)

MARGIN_TOKENS = 64


def times_ms(
    engine: Engine, batch_size: int, context: int, num_tokens: int, seed: int
) -> tuple[list[float], list[float]]:
    """Return the time to the first token of each request, and the time of each token after it once all are
    past their prompts."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(engine.arch.vocab_size, (batch_size, context), generator=generator).tolist()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for idx, prompt in enumerate(prompts):
        engine.add(Request(f"{seed}-{batch_size}-{idx}", tuple(prompt), params))
    finished = []
    while engine.has_work:
        finished += engine.step()
    all_decode_s = max(each.token_times_s[0] for each in finished)
    firsts_ms = [(each.token_times_s[0] - each.arrival_s) * 1e3 for each in finished]
    return firsts_ms, [
        (later - earlier) * 1e3
        for each in finished
        for earlier, later in zip(each.token_times_s, each.token_times_s[1:], strict=False)
        if earlier >= all_decode_s
    ]


def measure(args: argparse.Namespace, name: str, arch: Arch, device: torch.device) -> list[dict[str, Any]]:
    """Return one row for each format and number of requests."""
    dtype = model_dtype(device)
    rows = []
    for kv_format in args.formats:
        source = RandomSource(arch, device=device, dtype=dtype, scheme=scheme_named(args.scheme))
        config = EngineConfig(
            dtype=dtype,
            max_batch_size=max(args.batch_sizes),
            max_model_len=args.context + args.output_tokens + MARGIN_TOKENS,
            max_step_tokens=args.max_step_tokens,
            kv_format=None if kv_format == "dense" else kv_format,
        )
        engine = Engine(source, device=device, config=config)
        for batch_size in args.batch_sizes:
            started_s = time.perf_counter()
            firsts_ms, tokens_ms = list[float](), list[float]()
            for repeat in range(args.repeats + 1):
                firsts, tokens = times_ms(engine, batch_size, args.context, args.output_tokens, repeat)
                if repeat:  # the first one is the warm-up
                    firsts_ms += firsts
                    tokens_ms += tokens
            deciles = statistics.quantiles(tokens_ms, n=10, method="inclusive")
            rows.append(
                {
                    "tool": "compress",
                    "shape": name,
                    "scheme": args.scheme,
                    "kv": engine.kv_format,
                    "context": args.context,
                    "batch_size": batch_size,
                    "ttft_ms_p50": statistics.median(firsts_ms),
                    "tpot_ms_p50": statistics.median(tokens_ms),
                    "tpot_ms_p10": deciles[0],
                    "tpot_ms_p90": deciles[-1],
                    "kv_bytes_per_token": engine.kv_bytes_per_token,
                    "tokens_per_gib": (1 << 30) // engine.kv_bytes_per_token,
                    "repeats": args.repeats,
                }
            )
            took_s = time.perf_counter() - started_s
            print(f"{rows[-1]} in {took_s:.0f} s", file=sys.stderr, flush=True)
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    times = ("TTFT p50, ms", "TPOT p50, ms", "p10", "p90")
    header = ["KV cache", "requests", "context", *times, "bytes a token", "tokens a GiB"]
    cells = [
        [
            row["kv"],
            str(row["batch_size"]),
            f"{row['context']:,}",
            f"{row['ttft_ms_p50']:.1f}",
            *(f"{row[f'tpot_ms_{part}']:.3f}" for part in ("p50", "p10", "p90")),
            f"{row['kv_bytes_per_token']:,}",
            f"{row['tokens_per_gib']:,}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--formats", nargs="+", default=["dense", "FP8_TOKEN_HEAD", "FP8_ATTENTION"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    args = parse_arguments(parser, lambda document: tables(document["rows"]))
    name, arch = read_arch(args.model)
    device = pick_device()
    rows = measure(args, name, arch, device)
    if args.out is not None:
        write_results(args.out, rows, device=device, commit=args.commit, facts={})
    print(tables(rows))


if __name__ == "__main__":
    main()
