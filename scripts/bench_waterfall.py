"""One shape, from `transformers` as it comes to everything on: what each step takes off a token.

    python -m scripts.bench_waterfall --out benchmarks/h200/waterfall.json

Each row keeps what the rows above it have and adds one thing. Weights are random and of the named shape, so
speed alone is measured here; what a step costs in accuracy stands in the tables of `bench_quality.py`,
`bench_pruning.py`, `bench_recovery.py` and `bench_kv.py`. TTFT and TPOT are medians at each batch size
(`validate/latency.py`; a batch arrives together, its TTFT is the whole batch's prefill), `tokens/s` what a
whole batch puts out, prefill included; `weights` are the model's, without its draft. The last row forces the
acceptance of proposals (`--rate`): its draft is an EAGLE-3 head or a model of a named shape (`--draft`), with
random weights too, and its tokens are nobody's text.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.machine import measure_bandwidth
from compress.models.arch import Arch
from compress.models.fresh_eagle3 import random_eagle3
from compress.models.random_source import RandomSource
from compress.quant.scheme import Scheme, scheme_named
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.latency import LatencyConditions, measure_latency
from scripts.bench_pruned_speed import freest, pruned
from scripts.bench_runtime import BASELINES, release_memory, transformers_rows
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)

EAGLE3 = "eagle3"
HEAD_TOKENS = 32_000


@dataclass(frozen=True)
class Setup:
    """What a row serves."""

    arch: Arch
    scheme: Scheme | None = None
    head_scheme: Scheme | None = None
    kv_format: str | None = None
    draft: str | None = None


def setups(arch: Arch, args: argparse.Namespace) -> Iterator[tuple[str, Setup]]:
    """What is added -> everything so far."""
    yield "this runtime", (setup := Setup(arch))
    yield f"{args.scheme} weights", (setup := replace(setup, scheme=scheme_named(args.scheme)))
    if not arch.tied_head:
        yield (
            f"{args.head_scheme} head",
            (setup := replace(setup, head_scheme=scheme_named(args.head_scheme))),
        )
    smaller = pruned(freest(arch), args)
    layer = smaller.layers[0]
    yield (
        f"pruned to {layer.num_heads} heads, FFN {layer.intermediate_size}",
        (setup := replace(setup, arch=smaller)),
    )
    yield f"KV cache {args.kv_format}", (setup := replace(setup, kv_format=args.kv_format))
    yield f"draft {args.draft}, k = {args.k}, {args.rate:.0%} kept (forced)", replace(setup, draft=args.draft)


def proposer(setup: Setup, name: str, device: torch.device) -> ProposerOptions:
    """Its linears in the scheme of what it proposes to, and an EAGLE-3 head's output head, too."""
    made: dict[str, Any] = {"device": device, "dtype": model_dtype(device), "scheme": setup.scheme}
    if name != EAGLE3:
        return DraftModel(RandomSource(read_arch(name)[1], **made))
    vocab_size = min(HEAD_TOKENS, setup.arch.vocab_size)
    return Eagle3(
        random_eagle3(setup.arch, draft_vocab_size=vocab_size, head_scheme=setup.head_scheme, **made)
    )


def measured(
    setup: Setup, args: argparse.Namespace, device: torch.device, bandwidth: float
) -> list[dict[str, Any]]:
    dtype = model_dtype(device)
    source = RandomSource(
        setup.arch, device=device, dtype=dtype, scheme=setup.scheme, head_scheme=setup.head_scheme
    )
    speculative = None
    if setup.draft is not None:
        speculative = Speculative(proposer(setup, setup.draft, device), k=args.k, forced_rate=args.rate)
    most = max(args.batch_sizes)
    config = EngineConfig(
        dtype=dtype,
        max_batch_size=most,
        max_model_len=args.prompt_tokens + args.output_tokens,
        max_step_tokens=max(2048, most * args.prompt_tokens),
        kv_format=setup.kv_format,
        speculative=speculative,
    )
    engine = Engine(source, device=device, config=config)
    conditions = LatencyConditions(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        repeats=args.repeats,
        warmups=1,
        vocab_size=setup.arch.vocab_size,
        bandwidth_bytes_per_s=bandwidth,
        seed=0,
    )
    rows = measure_latency(engine, conditions, batch_sizes=args.batch_sizes)
    kept = ("batch_size", "ttft_ms_p50", "tpot_ms_p50", "output_tokens_per_s", "floor_ms")
    found = [
        {name: row.as_json()[name] for name in kept} | {"weight_bytes": engine.weight_bytes} for row in rows
    ]
    return (
        found if speculative is None else [{**row, "floor_ms": None} for row in found]
    )  # of a step, not of a token


def table(rows: list[dict[str, Any]]) -> str:
    """Times, and how many times faster than the first row of the same batch."""
    header = ["", "batch", "TTFT ms", "TPOT ms", "times the first", "tokens/s", "weights GB"]
    first = {row["batch_size"]: row["tpot_ms_p50"] for row in reversed(rows)}
    return markdown(
        header,
        [
            [
                row["step"], str(row["batch_size"]), f"{row['ttft_ms_p50']:.1f}", f"{row['tpot_ms_p50']:.2f}",
                f"{first[row['batch_size']] / row['tpot_ms_p50']:.1f}", f"{row['output_tokens_per_s']:,.0f}",
                f"{row['weight_bytes'] / 1e9:.1f}",
            ]
            for row in sorted(rows, key=lambda row: row["batch_size"])
        ],
    )  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--head-scheme", default="FP8_DYNAMIC")
    parser.add_argument("--kv-format", default="FP8_TOKEN_HEAD")
    parser.add_argument(
        "--heads", type=float, default=0.75, help="share of the query heads that stay, with their KV heads"
    )
    parser.add_argument("--ffn", type=float, default=0.8, help="share of the FFN channels that stay")
    parser.add_argument("--multiple", type=int, default=128)
    parser.add_argument("--draft", default=EAGLE3, help="'eagle3' for a head, or the shape of a draft model")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.8, help="with which the last row keeps proposals")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--baselines", nargs="*", default=list(BASELINES), choices=list(BASELINES), help="of transformers"
    )
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    shape, arch = read_arch(args.model)
    device = pick_device()
    lengths = {
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "repeats": args.repeats,
    }
    bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
    rows: list[dict[str, Any]] = []
    try:
        for batch_size in args.batch_sizes if args.baselines else ():
            for row in transformers_rows(
                shape, arch, device, batch_size=batch_size, kinds=args.baselines, **lengths
            ):
                kept = {name: row[name] for name in ("batch_size", "ttft_ms_p50", "tpot_ms_p50")}
                whole_s = (row["ttft_ms_p50"] + (args.output_tokens - 1) * row["tpot_ms_p50"]) / 1e3
                speed = {
                    "output_tokens_per_s": batch_size * args.output_tokens / whole_s,
                    "weight_bytes": 2 * arch.num_params,
                }
                rows.append({"step": row["tool"], **kept, **speed})
            release_memory()
        for step, setup in setups(arch, args):
            started_s = time.perf_counter()
            rows += [{"step": step, **row} for row in measured(setup, args, device, bandwidth)]
            gc.collect()
            print(f"{step}: {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
    finally:  # what was measured before a failure is kept
        print(table(rows))
        if args.out is not None:
            facts = {"shape": shape, "bandwidth_bytes_per_s": bandwidth, "forced_rate": args.rate} | lengths
            write_results(args.out, rows, device=device, commit=args.commit, facts=facts)


if __name__ == "__main__":
    main()
