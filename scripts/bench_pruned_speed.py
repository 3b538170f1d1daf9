r"""How much faster a decode step gets when heads and FFN channels go: a shape beside the shapes that pruning
leaves, in one run.

    python -m scripts.bench_pruned_speed --out benchmarks/h200/pruned_speed.json
        30 % of heads, 20 % of the FFN, llama-2-13b
    python -m scripts.bench_pruned_speed --model llama-3.1-8b --heads 0.75 --ffn 0.75 \
        --schemes dense W4A16_G128

Weights are random: time depends on shapes, not values. The numbers of heads and channels are the nearest
legal ones, as the prune stage takes them (`as_mistral` allows those whose heads do not divide the hidden
size). All engines are alive at once and take turns of two requests, so that a ratio is of neighbours in time.
A row: shape, scheme, variant, heads, ffn, params, step_bytes, tpot_ms (median of the turns) with least and
most, bytes_speedup (what the bytes of a step allow), speedup (median over turns of the source's TPOT / this
one's) with least and most.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from compress.machine import measure_bandwidth
from compress.models.arch import Arch
from compress.models.pruning import Widths, as_mistral, resized
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.stages.prune.widths import legal_channels, legal_heads, nearest_legal, with_heads
from compress.validate.latency import LatencyConditions, LatencyRow, measure_latency
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    scheme_text,
    schemes_of,
    write_results,
)

DENSE = "dense"
SOURCE = "source"


def variants(arch: Arch, args: argparse.Namespace) -> dict[str, Arch]:
    """By name: the source, and what pruning leaves of it under its own family's rules and under Mistral's."""
    found = {SOURCE: arch, "pruned": pruned(arch, args), "pruned, as mistral": pruned(freest(arch), args)}
    return (
        found
        if found["pruned"].layers != found["pruned, as mistral"].layers
        else {name: found[name] for name in (SOURCE, "pruned")}
    )


def freest(arch: Arch) -> Arch:
    """The same model under the family whose rules allow most numbers of heads."""
    return as_mistral(arch) if arch.config.get("model_type") == "llama" else arch


def pruned(base: Arch, args: argparse.Namespace) -> Arch:
    """With the legal numbers nearest to `args.heads` and `args.ffn`."""
    heads = nearest_legal(legal_heads(base, "kv_group", args.multiple), args.heads, "heads", args.multiple)
    channels = nearest_legal(legal_channels(base, args.multiple), args.ffn, "ffn", args.multiple)
    return resized(
        base, replace(with_heads(base, Widths.of(base), heads, "kv_group"), intermediate_size=channels)
    )


def rows_of(
    scheme: str, args: argparse.Namespace, name: str, arch: Arch, device: torch.device, bandwidth: float
) -> list[dict[str, Any]]:
    archs = variants(arch, args)
    dtype = model_dtype(device)
    engines = {}
    for variant, each in archs.items():
        source = RandomSource(each, device=device, dtype=dtype, scheme=schemes_of(scheme)[0])
        config = EngineConfig(
            dtype=dtype, max_batch_size=args.batch_size, max_model_len=args.prompt_tokens + args.output_tokens
        )
        engines[variant] = Engine(source, device=device, config=config)
    turns: dict[str, list[LatencyRow]] = {variant: [] for variant in archs}
    for turn in range(args.repeats + 1):
        for variant, engine in engines.items():
            conditions = LatencyConditions(
                prompt_tokens=args.prompt_tokens,
                output_tokens=args.output_tokens,
                repeats=2,
                warmups=1 if turn == 0 else 0,
                vocab_size=arch.vocab_size,
                bandwidth_bytes_per_s=bandwidth,
                seed=turn,
            )
            (row,) = measure_latency(engine, conditions, batch_sizes=[args.batch_size])
            if turn:
                turns[variant].append(row)
    of_source = turns[SOURCE]
    rows = []
    for variant, each in archs.items():
        tpots = [row.tpot_ms_p50.value for row in turns[variant]]
        speedups = [before.tpot_ms_p50.value / tpot for before, tpot in zip(of_source, tpots, strict=True)]
        shape = each.layers[0]
        step_bytes = turns[variant][0].step_bytes
        rows.append(
            {
                "shape": name,
                "scheme": scheme,
                "variant": variant,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "ffn": shape.intermediate_size,
                "params": each.num_params,
                "batch_size": args.batch_size,
                "prompt_tokens": args.prompt_tokens,
                "output_tokens": args.output_tokens,
                "repeats": args.repeats,
                "step_bytes": step_bytes,
                "tpot_ms": statistics.median(tpots),
                "tpot_ms_least": min(tpots),
                "tpot_ms_most": max(tpots),
                "bytes_speedup": of_source[0].step_bytes / step_bytes,
                "speedup": statistics.median(speedups),
                "speedup_least": min(speedups),
                "speedup_most": max(speedups),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    shown = (
        "scheme",
        "variant",
        "heads",
        "ffn",
        "tpot_ms",
        "bytes_speedup",
        "speedup",
        "speedup_least",
        "speedup_most",
    )
    return markdown(
        shown,
        [
            [f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key]) for key in shown]
            for row in rows
        ],
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--heads", type=float, default=0.7, help="share of the query heads that stay, with their KV heads"
    )
    parser.add_argument("--ffn", type=float, default=0.8, help="share of the FFN channels that stay")
    parser.add_argument("--multiple", type=int, default=128)
    parser.add_argument("--schemes", nargs="+", type=scheme_text, default=[DENSE, "W4A16_G128"])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.set_defaults(model="llama-2-13b")
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    name, arch = read_arch(args.model)
    device = pick_device()
    bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
    rows = [row for scheme in args.schemes for row in rows_of(scheme, args, name, arch, device, bandwidth)]
    print(table(rows))
    if args.out is not None:
        write_results(
            args.out, rows, device=device, commit=args.commit, facts={"bandwidth_bytes_per_s": bandwidth}
        )


if __name__ == "__main__":
    main()
