"""How fast a prompt's linears of int8 are, tile by tile, beside cuBLAS's two passes and beside FP8.

    python -m scripts.bench_int8 --out benchmarks/h200/int8.json
    python -m scripts.bench_int8 --rows 2048 --linears gate_up down

`one pass` is `kernels/linear/prefill_int8.py`: the tile that it chooses, then each of TILES that compiles on
this device. `two passes` is `torch._int_mm` and the scaling of its sums, `_int_mm` the product alone, `fp8`
what FP8_DYNAMIC runs on. o and down add a residual. Every result of int8 is first compared, bit for bit, with
whole numbers scaled in float32. Times are of sustained runs: the median, with the 10th and 90th percentile.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from compress.kernels.coverage import linear_shape
from compress.kernels.linear import int8, prefill_fp8, prefill_int8, prefill_int8_passes
from compress.kernels.linear.fp8 import PackedFp8
from compress.kernels.linear.prefill_int8 import PromptTile
from compress.kernels.operands.rows import FP8, INT8, ActivationQuant, QuantizedRows, quantize
from scripts.bench_setup import (
    argument_parser,
    markdown,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)
from scripts.kernel_bench.timer import poisoned_memory, time_launches

LINEARS = ("qkv", "o", "gate_up", "down")
WITH_RESIDUAL = ("o", "down")
COPIES = 4
REPLAYS = 7
FP8_SM = (8, 9)
TILES = (
    *(PromptTile(128, 256, 128, 8, stages, persistent) for stages in (3, 4) for persistent in (True, False)),
    PromptTile(128, 256, 64, 8, 6, True),
    PromptTile(256, 128, 128, 8, 3, True),
    *(PromptTile(128, 128, 128, 8, stages, persistent) for stages in (3, 4) for persistent in (True, False)),
    PromptTile(128, 128, 128, 4, 3, False),
    PromptTile(64, 256, 128, 4, 3, False),
    PromptTile(64, 256, 128, 8, 4, True),
    PromptTile(64, 128, 128, 4, 5, True),
)
"""Tiles beside those that the kernel chooses among."""

Product = Callable[[int], Tensor]
"""A product with one of the copies of a weight."""


def products(
    x: QuantizedRows,
    packed: Sequence[int8.PackedInt8],
    residual_TO: Tensor | None,
    tiles: Sequence[PromptTile],
) -> Iterator[tuple[str, Product]]:
    """Yield the ways to multiply int8, by name; `_int_mm` leaves sums that are not scaled."""
    for tile in (None, *tiles):
        name = "one pass" if tile is None else f"one pass {_shown(tile)}"
        yield (
            name,
            lambda i, tile=tile: prefill_int8.linear(  # type: ignore[misc]
                x, packed[i], None, residual_TO=residual_TO, tile=tile
            ),
        )
    yield "two passes", lambda i: prefill_int8_passes.linear(x, packed[i], None, residual_TO=residual_TO)
    yield "_int_mm", lambda i: int8.int_product(x.values_TK, packed[i].codes_OI)


def _shown(tile: PromptTile) -> str:
    sizes = f"{tile.rows}x{tile.outputs}x{tile.columns}"
    return f"{sizes} w{tile.num_warps} s{tile.num_stages}{' persistent' if tile.persistent else ''}"


def measure(
    name: str, product: Product, expected: Tensor | None, device: torch.device
) -> dict[str, Any] | None:
    """Return times and whether the bits are those expected; None where the tile needs more of the device than
    it has."""
    try:
        with poisoned_memory():
            result = product(0)
    except triton.runtime.errors.OutOfResources:
        return None
    right = expected is None or torch.equal(result, expected)
    launches = [partial(product, i) for i in range(COPIES)]
    timing = time_launches(launches, device, replays=REPLAYS, sustained=True)
    right = right and (expected is None or torch.equal(timing.output, expected))
    return {"kernel": name, **timing.as_json(), "passed": right}


def rows_of(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each linear, number of rows and way to multiply."""
    _, arch = read_arch(args.model)
    generator = torch.Generator(device).manual_seed(0)
    for name in args.linears:
        n, k = linear_shape(arch, name)
        codes_OI = torch.randint(-128, 128, (n, k), device=device, generator=generator).to(INT8)
        scale_O = torch.rand(n, device=device, generator=generator) / 64 + 0.001
        packed = [int8.PackedInt8(codes_OI.clone(), scale_O, torch.bfloat16) for _ in range(COPIES)]
        for m in args.rows:
            x_TK = torch.randn(m, k, device=device, generator=generator).to(torch.bfloat16)
            x = quantize(x_TK, ActivationQuant(dtype=INT8))
            residual_TO = torch.randn(m, n, device=device, generator=generator).to(torch.bfloat16)
            residual = residual_TO if name in WITH_RESIDUAL else None
            expected = int8.linear(x, packed[0], None, residual_TO=residual)
            facts = {"op": "linear", "name": name, "shape": [n, k], "m": m}
            for kernel, product in products(x, packed, residual, args.tiles):
                found = measure(kernel, product, None if kernel == "_int_mm" else expected, device)
                if found is not None:
                    yield _row(facts, "INT8_DYNAMIC", found)
            if torch.cuda.get_device_capability(device) >= FP8_SM:
                fp8 = [PackedFp8(each.codes_OI.to(FP8), scale_O, torch.bfloat16) for each in packed]
                codes = quantize(x_TK, ActivationQuant())
                product = lambda i: prefill_fp8.linear(codes, fp8[i], None, residual_TO=residual)  # noqa: B023, E731
                found = measure("fp8", product, None, device)
                assert found is not None
                yield _row(facts, "FP8_DYNAMIC", found)


def _row(facts: dict[str, Any], scheme: str, found: dict[str, Any]) -> dict[str, Any]:
    n, k = facts["shape"]
    row = {**facts, "scheme": scheme, **found, "tflop_per_s": 2 * facts["m"] * n * k / found["us"] / 1e6}
    print(f"{row['name']} T={row['m']} {row['kernel']}: {row['us']:.1f} us", file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a kernel, one column a linear and number of rows: microseconds and TFLOP/s."""
    columns = list(dict.fromkeys((row["name"], row["m"]) for row in rows))
    lines: dict[str, dict[tuple[str, int], str]] = {}
    for row in rows:
        cell = f"{row['us']:.1f} {row['tflop_per_s']:.0f}{'' if row['passed'] else ' WRONG'}"
        lines.setdefault(row["kernel"], {})[row["name"], row["m"]] = cell
    header = ["us TFLOP/s", *(f"{name} T={m}" for name, m in columns)]
    return markdown(
        header, [[name, *(cells.get(each, "") for each in columns)] for name, cells in lines.items()]
    )


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--linears", nargs="+", default=list(LINEARS), choices=LINEARS)
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 512, 1024, 2048, 8192])
    parser.add_argument("--few", action="store_true", help="no tiles but those that the kernel chooses")
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    args.tiles = () if args.few else TILES
    return args


def main() -> None:
    args = arguments()
    device = pick_device()
    if device.type != "cuda":
        sys.exit("int8 of prompts is measured on a CUDA device, and there is none here.")
    rows: list[dict[str, Any]] = []
    try:
        with torch.inference_mode():
            rows.extend(rows_of(args, device))
    finally:  # what was measured before a failure is kept
        if args.out is not None:
            write_results(args.out, rows, device=device, commit=args.commit, facts={"model": args.model})
        print(table(rows))
    wrong = sum(not row["passed"] for row in rows)
    if wrong:
        sys.exit(f"{wrong} of {len(rows)} results have other bits than they should.")


if __name__ == "__main__":
    main()
