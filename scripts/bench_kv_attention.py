"""How close decode attention comes to the memory, for each format of the KV cache, and what its constants do.

    python -m scripts.bench_kv_attention --out benchmarks/h200/kv_attention.json
    python -m scripts.bench_kv_attention --sweep --kv-formats INT4_TOKEN_HEAD --batch-sizes 16

One query a request over full contexts, timed and checked as in `bench_kernels.py`: each case against a
float64 reference with fresh memory poisoned, medians over graph replays over distinct memory.
`bandwidth_frac` is the bytes of codes and scales over time, of the read bandwidth measured in this run. With
`--sweep` every slicing of the Hopper kernel (`attention_decode/hopper.py`) is a case of its own, named by
its keys, lanes, depth, warps and blocks of a cluster, and whether the copy engine brings slices.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compress.kernels.attention_decode.hopper import Variant, attend
from compress.kernels.attention_decode.hopper_plan import Slicing, clusters_of, row_eights_of
from compress.kernels.operands.paged import SECTION_KEYS, TOKEN_HEAD_FORMATS
from compress.machine import measure_bandwidth, measure_matmul_rate
from scripts.bench_kernels import BLOCK_SIZE, DENSE, BitsOfRows, Rates, measure
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)
from scripts.kernel_bench.attention import attention_decode_cases, decode_cases_of
from scripts.kernel_bench.case import Bench, Case

KEYS = (32, 64)
LANES = (16, 32)
DEPTHS = (1, 2, 3)
WARPS = (2, 4, 8)
MAX_BLOCKS = 8 * 132
"""Blocks of a launch beyond which a larger cluster is not tried: they are not all there at once."""
MAX_SHARED_BYTES = 223 * 1024
"""Shared memory of a block, less four KB of static variables."""


def slicings(bench: Bench, kv_format: str, context: int, batch_size: int) -> dict[str, Callable[..., Tensor]]:
    """Return the Hopper kernel by its constants, for one query a request, where a block of it fits."""
    layer = bench.arch.layers[0]
    group = layer.num_heads // layer.num_kv_heads
    eights = row_eights_of(group)
    section_keys = SECTION_KEYS if context > SECTION_KEYS else None
    pairs = batch_size * layer.num_kv_heads * -(-context // SECTION_KEYS)
    found = {}
    all_constants = product(KEYS, LANES, DEPTHS, WARPS, (False, True), (False, True))
    for each in (Slicing(*constants) for constants in all_constants):
        for cluster in clusters_of(each):
            variant = Variant(bench.dtype, kv_format, layer.head_dim, 64, eights, cluster, True, True, each)
            if each.engine and not variant.tiled:
                continue  # the same kernel as without the engine
            there_at_once = cluster == 1 or cluster * pairs <= MAX_BLOCKS
            if there_at_once and variant.shared_bytes(group) <= MAX_SHARED_BYTES:
                cut = f"{each.keys} keys, {each.lanes} lanes, depth {each.depth}"
                name = f"{cut}, {each.warps} warps x {cluster}{', engine' * each.engine}"
                name += ", specialized" * each.specialized
                found[name] = partial(
                    attend, row_eights=eights, cluster=cluster, slicing=each, section_keys=section_keys
                )
    return found


def cases(args: argparse.Namespace, bench: Bench) -> Iterator[Case]:
    kv_formats = [bench.dense if each == DENSE else each for each in args.kv_formats]
    sizes = {"contexts": args.contexts, "batch_sizes": args.batch_sizes}
    block_size = BLOCK_SIZE[bench.device.type]
    if not args.sweep:
        yield from attention_decode_cases(bench, kv_formats=kv_formats, block_size=block_size, **sizes)
        return
    for kv_format, context, batch_size in product(kv_formats, args.contexts, args.batch_sizes):
        facts: dict[str, Any] = {"kv_format": kv_format, "context": context, "batch_size": batch_size}
        attentions = slicings(bench, kv_format, context, batch_size)
        yield from decode_cases_of(bench, attentions, block_size=block_size, **facts)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of each case, the fastest first."""
    header = ["cache", "context", "requests", "us", "p10", "p90", "TB/s", "% of bandwidth", "kernel"]
    order = {key: idx for idx, key in enumerate(dict.fromkeys(_case_of(row) for row in rows))}
    cells = [
        [
            row["scheme"],
            row["name"].removeprefix("context "),
            str(row["m"]),
            *(f"{row[each]:.1f}" for each in ("us", "us_p10", "us_p90")),
            f"{row['tb_per_s']:.2f}",
            f"{100 * row['bandwidth_frac']:.0f}" + ("" if row["passed"] else " WRONG"),
            row["kernel"],
        ]
        for row in sorted(rows, key=lambda row: (order[_case_of(row)], row["us"]))
    ]
    return markdown(header, cells)


def _case_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["scheme"], row["name"], row["m"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kv-formats", nargs="+", default=[DENSE, *TOKEN_HEAD_FORMATS])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--sweep", action="store_true", help="time every slicing of the Hopper kernel")
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    device = pick_device()
    name, arch = read_arch(args.model)
    bench = Bench(arch, device, model_dtype(device), rows=(1,))
    small = device.type == "cpu"
    rates = Rates(
        measure_bandwidth(device, size_bytes=1 << 26 if small else None),
        measure_matmul_rate(device, bench.dtype, size=256 if small else None),
    )
    rows = []
    try:
        with torch.inference_mode():
            for case in cases(args, bench):
                rows.append(measure(case, bench, rates, BitsOfRows(), alone=False))
    finally:
        if args.out is not None:
            facts = {"model": name, **vars(rates)}
            write_results(args.out, rows, device=device, commit=args.commit, facts=facts)
        print(table(rows))
    if not all(row["passed"] for row in rows):
        sys.exit("The cases marked WRONG are not what the reference gives.")


if __name__ == "__main__":
    main()
