"""TPOT of two checkouts beside each other: alternating processes on one GPU, and whether both give the same
tokens.

    python scripts/bench_two_trees.py BEFORE AFTER --out benchmarks/h200/two_trees.json

BEFORE and AFTER are directories that hold a package `compress`. Each process serves every scheme with random
weights of one shape and prints its medians; processes alternate as before, after, after, before, so that a
drift of the machine falls on both. Only names that external programs import are used, so that one script can
serve checkouts of different ages. Tokens are greedy and compared by digest.

A speculative row drafts with a small model and keeps a forced share of its tokens, so that its time depends
on steps alone.
"""

import argparse
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCHEMES = ("dense", "FP8_DYNAMIC", "W4A16_G128", "W4A16_G128+FP8_DYNAMIC")


def probe(args: argparse.Namespace) -> None:
    """Measure the checkout that is imported and print one JSON line a row."""
    import torch

    from compress.models.family import family_of
    from compress.models.known import known_config
    from compress.models.random_source import RandomSource
    from compress.quant.scheme import scheme_named
    from compress.runtime.engine import Engine
    from compress.runtime.engine_config import EngineConfig
    from compress.runtime.request import Request, SamplingParams
    from compress.runtime.speculative.draft_model import DraftModel
    from compress.runtime.speculative.speculation import Speculative

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def source(model: str, scheme: str) -> Any:
        config = json.loads(Path(model).read_text()) if Path(model).is_file() else known_config(model)
        linears, _, head = scheme.partition("+")
        return RandomSource(
            family_of(config).read_config(config),
            device=device,
            dtype=dtype,
            scheme=None if linears == "dense" else scheme_named(linears),
            head_scheme=scheme_named(head) if head else None,
        )

    def measure(name: str, engine: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for batch_size in args.batch_sizes:
            size = (batch_size, args.prompt_tokens)
            prompts = torch.randint(engine.arch.vocab_size, size, generator=generator).tolist()
            params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True)
            spans = list[float]()
            firsts = list[float]()
            digest = hashlib.sha256()
            for repeat in range(args.warmups + args.repeats):
                for idx, prompt in enumerate(prompts):
                    engine.add(Request(f"{batch_size}-{repeat}-{idx}", tuple(prompt), params))
                finished = []
                while engine.has_work:
                    finished += engine.step()
                if repeat >= args.warmups:
                    for each in finished:
                        times = each.token_times_s
                        spans.append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
                        firsts.append((times[0] - each.arrival_s) * 1e3)
                for each in sorted(finished, key=lambda one: one.id):
                    digest.update(json.dumps(list(each.tokens)).encode())
            low, median, high = (
                statistics.quantiles(spans, n=20)[0],
                statistics.median(spans),
                statistics.quantiles(spans, n=20)[-1],
            )
            row = {
                "scheme": name,
                "batch_size": batch_size,
                "tpot_ms_p50": median,
                "tpot_ms_p5": low,
                "tpot_ms_p95": high,
                "ttft_ms_p50": statistics.median(firsts),
                "tokens": digest.hexdigest()[:16],
            }
            print(json.dumps(row), flush=True)

    def engine(weights: Any, speculative: Any = None) -> Any:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = args.prompt_tokens + args.output_tokens + 16
        config = EngineConfig(
            dtype=dtype, max_batch_size=max(args.batch_sizes), max_model_len=longest, speculative=speculative
        )
        return Engine(weights, device=device, config=config)

    for scheme in args.schemes:
        measure(scheme, engine(source(args.model, scheme)))
    if args.draft:
        drafter = DraftModel(source(args.draft, "W4A16_G128"))
        args.batch_sizes = [1]
        measure(
            f"W4A16_G128, draft of {args.draft}, 80 % kept",
            engine(source(args.model, "W4A16_G128"), Speculative(drafter, k=4, forced_rate=0.8)),
        )


def facts() -> dict[str, Any]:
    """Return what the numbers depend on: device, driver, clocks, host and versions."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu",
            "--format=csv,noheader",
        ]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        import triton

        found["triton"] = triton.__version__
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, metavar="DIRECTORY", help="BEFORE and AFTER")
    parser.add_argument(
        "--names", nargs=2, default=["before", "after"], help="what the two are called, such as commits"
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--draft", default="llama-3.2-1b", help="shape of the draft model; '' for no speculative row"
    )
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of before, after, after, before")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args)
        return
    if len(args.trees) != 2:
        parser.error("name two directories, BEFORE and AFTER")
    order = [0, 1, 1, 0] * args.rounds
    rows: dict[tuple[str, int], list[list[dict[str, Any]]]] = {}
    for tree in order:
        command = [sys.executable, __file__, "--probe", *sys.argv[1:]]
        begin = time.perf_counter()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(args.trees[tree].resolve()), os.environ.get("PYTHONPATH", "")]
            ),
        }
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        print(f"{args.names[tree]}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        for row in map(json.loads, done.stdout.splitlines()):
            rows.setdefault((row["scheme"], row["batch_size"]), [[], []])[tree].append(row)
    table = []
    for (scheme, batch_size), (before, after) in rows.items():
        medians = [statistics.median(row["tpot_ms_p50"] for row in side) for side in (before, after)]
        table.append(
            {
                "scheme": scheme,
                "batch_size": batch_size,
                "before_tpot_ms": medians[0],
                "after_tpot_ms": medians[1],
                "ratio": medians[1] / medians[0],
                "spread": [[row["tpot_ms_p50"] for row in side] for side in (before, after)],
                "before_ttft_ms": statistics.median(row["ttft_ms_p50"] for row in before),
                "after_ttft_ms": statistics.median(row["ttft_ms_p50"] for row in after),
                "same_tokens": len({row["tokens"] for side in (before, after) for row in side}) == 1,
                "tokens": [sorted({row["tokens"] for row in side}) for side in (before, after)],
            }
        )
    for row in table:
        print(
            f"{row['scheme']:45} x{row['batch_size']:<3} {row['before_tpot_ms']:.4f} -> "
            f"{row['after_tpot_ms']:.4f} ms "
            f"({row['ratio']:.4f}), TTFT {row['before_ttft_ms']:.2f} -> {row['after_ttft_ms']:.2f}, "
            f"tokens {'equal' if row['same_tokens'] else 'differ: ' + json.dumps(row['tokens'])}"
        )
    if args.out is not None:
        document = {
            "schema": 1,
            "names": args.names,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
            **facts(),
            "shape": args.model,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "rows": table,
        }
        args.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
