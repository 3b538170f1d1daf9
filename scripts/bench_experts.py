"""How fast the kernels of a mixture of experts are, beside the bytes of the experts that are hit.

    python -m scripts.bench_experts --out benchmarks/h200/experts.json
    python -m scripts.bench_experts --schemes W4A16_G128 --rows 1 16 --sweep

First every format is checked on small odd shapes against the torch reference, with fresh memory poisoned, and
rows of the timed shape must have the same bits alone and in any company. Times are of CUDA-graph replays over
several layers of weights, more than the L2 holds, per layer: the median, with the 10th and 90th percentile.
Ids are drawn, not routed, from experts of uneven popularity; the experts hit in each case are counted. The
floor is the bytes of the experts hit over the bandwidth given.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from compress.kernels.experts import fused, launch, packed, reference, slice_tiles, slices
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.matrices import Matrices
from compress.kernels.operands.matrix_product import Tile
from compress.kernels.operands.routing import ExpertWeights, router_weights
from compress.kernels.operands.slices import SLICES
from compress.kernels.problem import KernelDevice
from compress.kernels.router import fused as router_fused
from compress.kernels.router import reference as router_reference
from compress.kernels.router import warps
from compress.kernels.select import Kernel, select
from compress.models.experts import Experts
from compress.models.layer_shape import UNGATED
from compress.quant.numerics import grouped as in_groups
from compress.quant.numerics import min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES
from compress.runtime.deployment import SHORT_PROMPT_ROWS
from scripts.kernel_bench.timer import poisoned_memory, time_launches

SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, "silu"),
    "qwen3-235b-a22b": (4096, 1536, 96, 8, "silu"),
    "qwen3.5-35b-a3b": (2048, 512, 257, 9, "silu"),
    "kimi-linear-48b-a3b": (2304, 1024, 257, 9, "silu"),
    "glm-4.5-air": (4096, 1408, 129, 9, "silu"),
    "glm-4.7-flash": (2048, 1536, 65, 5, "silu"),
    "deepseek-v3": (7168, 2048, 48, 9, "silu"),
    "lfm2-8b-a1b": (2048, 1792, 32, 4, "silu"),
    "mixtral-8x7b": (4096, 14336, 8, 2, "silu"),
    "llama-4-scout": (5120, 8192, 16, 1, "silu"),
    "nemotron-3-nano-30b-a3b": (2688, 1856, 130, 8, "relu2"),
    "nemotron-3-super-120b-a12b": (1024, 2688, 512, 22, "relu2"),
    "tiny": (256, 128, 12, 3, "silu"),
}
"""Numbers of a token that an expert reads, size of an expert, experts, choices and activation; experts that
all rows choose are drawn as the others. Qwen3-235B and DeepSeek-V3 have fewer experts here, which fit a
GPU."""
SPREAD = 0.55
"""Standard deviation of an expert's popularity in logits: 16 rows then hit about 76 of 128 experts."""
BANDWIDTH = 4.8e12


def drawn_ids(rows: int, experts: int, top_k: int, seed: int, device: torch.device) -> Tensor:
    """Draw ids [T, K] of experts of uneven popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = SPREAD * torch.randn(experts, generator=generator)
    noise = -torch.log(-torch.log(torch.rand(rows, experts, generator=generator)))
    return (popularity + noise).topk(top_k, dim=1).indices.to(torch.int32).to(device)


def random_weights(shape: tuple[int, int], scheme: str | None, dtype: torch.dtype, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    w = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    if scheme is None:
        return w
    known = SCHEMES[scheme]
    scale, zero = min_max_scale(in_groups(w, known), known, dtype if known.type == "int" else torch.float32)
    return round_to_nearest(w, known, scale, zero)


def random_experts(
    scheme: str | None,
    hidden: int,
    ffn: int,
    count: int,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    gated: bool = True,
) -> list[ExpertWeights]:
    made = []
    for idx in range(count):
        gate, up, down = (
            random_weights(shape, scheme, dtype, 3 * idx + part)
            for part, shape in enumerate(((ffn, hidden), (ffn, hidden), (hidden, ffn)))
        )
        biases = [torch.randn(size).to(dtype) for size in (ffn, ffn, hidden)] if bias else []
        made.append(ExpertWeights(gate if gated else None, up, down, *biases))
    return made


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _call(
    inputs: dict[str, Tensor],
    ready: packed.PackedExperts,
    activation: str,
    fn: Callable[..., Tensor],
    rows: slice,
) -> Tensor:
    with poisoned_memory():
        return fn(
            **{name: each[rows].contiguous() for name, each in inputs.items()},
            packed=ready,
            activation=activation,
        )


def checks(device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare every format with the reference on odd shapes, and rows in company with rows alone."""
    cases: list[tuple[str | None, torch.dtype, str, bool, tuple[int, int, int, int]]] = [
        (None, torch.bfloat16, "silu", False, (304, 208, 12, 3)),
        (None, torch.float16, "swiglu_clamped", True, (96, 80, 5, 2)),
        ("W4A16_G128", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
        ("W4A16_G128", torch.float16, "gelu_pytorch_tanh", False, (256, 128, 12, 3)),
        ("W4A16_G32_ASYM", torch.bfloat16, "silu", True, (256, 384, 7, 4)),
        ("W4A16_CHANNEL", torch.bfloat16, "silu", False, (256, 128, 12, 3)),
        ("FP8_DYNAMIC", torch.bfloat16, "silu", False, (416, 160, 12, 3)),
        ("FP8_BLOCK", torch.bfloat16, "silu", False, (384, 256, 12, 3)),
    ]
    for scheme, dtype, activation, bias, (hidden, ffn, count, top_k) in cases:
        experts = random_experts(scheme, hidden, ffn, count, dtype, bias=bias)
        ready = packed.repack(experts, dtype=dtype, device=device)
        definition = reference.repack(experts, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(5)
        x, residual = (torch.randn(300, hidden, generator=generator).to(device, dtype) for _ in range(2))
        ids = drawn_ids(300, count, top_k, 1, device)
        ids[:40] = torch.arange(top_k, device=device, dtype=torch.int32)
        weights = torch.rand(300, top_k, generator=generator).to(device)
        inputs = {"x_TD": x, "ids_TK": ids, "weights_TK": weights, "residual_TD": residual}
        expected = reference.experts(
            x, definition, ids, weights, activation=activation, rows=4, residual_TD=residual
        )

        call = partial(_call, inputs, ready, activation)
        decode = decode_kernel(ready, scheme, activation, top_k, SHORT_PROMPT_ROWS).fn
        few = call(decode, slice(0, 300))
        alone = all(
            torch.equal(call(decode, slice(start, stop)), few[start:stop])
            for start, stop in (
                (0, 1),
                (7, 8),
                (41, 42),
                (0, 4),
                (3, 12),
                (40, 56),
                (0, 17),
                (39, 103),
                (0, 128),
            )
        )
        many = call(fused.prefill, slice(0, 300))
        yield {
            "check": scheme or str(dtype),
            "activation": activation,
            "decode_error": relative_error(few, expected),
            "prefill_error": relative_error(many, expected),
            "same_bits": alone,
            "arrivals": int(ready.arrivals.abs().sum()),
        }


def router_checks(device: torch.device) -> Iterator[dict[str, Any]]:
    cases = [
        (Experts(128, 8, 1, renormalize=True), 2048, False),
        (Experts(60, 4, 1), 320, True),
        (Experts(32, 4, 1, score="softmax_topk"), 2880, True),
        (
            Experts(
                64, 6, 1, score="sigmoid", renormalize=True, scale=2.5, num_groups=8, top_groups=3,
                selection_bias=True,
            ),
            512,
            False,
        ),
    ]  # fmt: skip
    for facts, hidden, bias in cases:
        x = torch.randn(150, hidden, dtype=torch.bfloat16, device=device)
        count = facts.num_experts
        weights = router_weights(
            torch.randn(count, hidden) * hidden**-0.5,
            torch.randn(count) if bias else None,
            torch.rand(count) * 0.2 if facts.selection_bias else None,
            dtype=torch.bfloat16,
            device=device,
        )
        ids, w = router_reference.route(x, weights, facts)
        with poisoned_memory():
            few_ids, few_w = warps.route(x, weights, facts)
            many_ids, _ = router_fused.route_many(x, weights, facts)
            alone = all(
                torch.equal(each[0], few_ids[start:stop]) and torch.equal(each[1], few_w[start:stop])
                for start, stop in ((0, 1), (7, 24), (149, 150), (3, 131))
                for each in [warps.route(x[start:stop], weights, facts)]
            )
        same = (ids == few_ids).all(1)
        yield {
            "check": f"router {facts.score}",
            "same_ids_frac": float(same.float().mean()),
            "same_ids_frac_many": float((ids == many_ids).all(1).float().mean()),
            "weight_error": float((few_w - w)[same].abs().max()),
            "same_bits": alone,
            "arrivals": int(weights.arrivals.abs().sum()),
        }


def empty_layer(
    scheme: str, hidden: int, ffn: int, count: int, dtype: torch.dtype, device: torch.device, *, gated: bool
) -> packed.PackedExperts:
    """Random codes and scales of a layer, made on the device."""
    known = None if scheme in ("BF16", "F16") else scheme
    one = random_experts(known, hidden, ffn, 1, dtype, gated=gated)
    small = packed.repack(one, dtype=dtype, device=device)

    def many(each: Tensor | None) -> Tensor | None:
        if each is None:
            return None
        rolled = [each[0].roll(7 * idx, 0) for idx in range(count)]
        return torch.stack(rolled)

    def matrices(each: Matrices) -> Matrices:
        data = many(each.data)
        assert data is not None
        return replace(
            each, data=data, scale=many(each.scale), offset=many(each.offset), outer=many(each.outer)
        )

    return replace(small, gate_up=matrices(small.gate_up), down=matrices(small.down), num_experts=count)


def decode_kernel(
    ready: packed.PackedExperts, scheme: str | None, activation: str, top_k: int, most: int
) -> Kernel:
    """Return the kernel that serves decode rows of an engine with at most so many."""
    device = KernelDevice.from_torch(ready.down.data.device, ready.dtype, decode_rows=most)
    return select(
        device.problem(
            "experts",
            n=ready.down.out_features,
            k=ready.down.in_features,
            scheme=scheme,
            activation=activation,
            experts=ready.num_experts,
            top_k=top_k,
        )
    )


def sweep_plans(plan: launch.Plan, ready: packed.PackedExperts, *, prefill: bool) -> Iterator[launch.Plan]:
    """Yield plans with other tiles for both products."""
    columns = [128] if ready.format in ("w4", "fp8_block") else [64, 128]
    if prefill:
        sizes = [(64, bn, count, stages) for bn in (64, 128) for count in (4, 8) for stages in (2, 3)]
        sizes += [(128, bn, 8, stages) for bn in (64, 128) for stages in (2, 3)]
        sizes += [(128, 64, 4, 3), (64, 32, 4, 3), (128, 32, 4, 3)]
    else:
        for bn in sorted({8, plan.gate_up.bn}):
            resized = replace(plan, gate_up=replace(plan.gate_up, bn=bn), down=replace(plan.down, bn=bn))
            yield replace(resized, combine=not plan.combine)
            yield replace(resized, sort=not plan.sort)
            yield replace(resized, sort=not plan.sort, combine=not plan.combine)
        if not plan.sort:
            yield replace(plan, prefetch=not plan.prefetch)
        shapes = [
            (16, 1, 4),
            (16, 1, 6),
            (32, 1, 4),
            (32, 2, 3),
            (32, 2, 4),
            (32, 2, 6),
            (64, 4, 2),
            (64, 4, 3),
        ]
        shapes += [(64, 4, 4), (128, 4, 3), (64, 2, 3), (64, 2, 4), (128, 8, 3)]
        bns = (8,) if not plan.sort else (8, 16)
        sizes = [(bm, bn, count, stages) for bm, count, stages in shapes for bn in bns]
    for (bm, bn, *pipeline), bk in itertools.product(sizes, columns):
        tile = Tile(bm, bn, bk, *pipeline)
        yield replace(plan, gate_up=tile, down=tile)


def sweep_tiles(
    served: tuple[slices.Tile, slices.Tile], most_parts: int, *, gated: bool
) -> Iterator[tuple[slices.Tile, slices.Tile]]:
    """Yield other tiles for one of the products of decode rows in slices, of down with at most so many warps
    that share slices."""
    of_first = (1, 2) if gated else (1, 2, 4)
    for place, outputs, most in ((0, of_first, SLICES), (1, (1, 2, 4), most_parts)):
        for parts, staged in itertools.product((1, 2, 4, 8), (True, False)):
            if parts > most:
                continue
            for output_tiles, depth, blocks in itertools.product(outputs, (1, 2, 3), (3, 5)):
                tile = slices.Tile(output_tiles, served[place].row_tiles, depth, blocks, parts, staged)
                yield (tile, served[1]) if place == 0 else (served[0], tile)


Plan = tuple[str, Callable[..., Tensor], dict[str, Any]]
"""What it is called, the function, and the plan or the tiles that it is given."""


def plans_of(
    ready: packed.PackedExperts,
    scheme: str | None,
    rows: int,
    top_k: int,
    activation: str,
    *,
    most: int,
    sweep: bool,
) -> Iterator[Plan]:
    """Yield how rows of an engine with at most so many are served, and other ways where a sweep is wanted."""
    prefill = rows > launch.MAX_DECODE_ROWS
    decode = decode_kernel(ready, scheme, activation, top_k, most)
    resident_serves = decode.name.startswith("cuda.resident")
    if resident_serves and not prefill:
        yield "served", decode.fn, {}
        if not sweep:
            return
    elif not prefill and ready.format in packed.DECODED_IN_SLICES:
        gpu = gpu_of(ready.down.data.device)
        served = slice_tiles.tiles_of(ready, rows, top_k, gpu)
        yield "served", slices.decode, {"tiles": served}
        most_parts = (
            slice_tiles.MOST_WARPS // top_k if slice_tiles.is_paired(ready, rows, top_k, gpu) else SLICES
        )
        for tiles in sweep_tiles(served, most_parts, gated=ready.gated) if sweep else ():
            yield "sweep", slices.decode, {"tiles": tiles}
        return
    plan = fused.prefill_plan(ready, rows, top_k) if prefill else fused.decode_plan(ready, rows)
    yield "served" if prefill or not resident_serves else "sweep", launch.run, {"plan": plan}
    for other in sweep_plans(plan, ready, prefill=prefill) if sweep else ():
        yield "sweep", launch.run, {"plan": other}


def experts_hit(ids: list[Tensor]) -> float:
    return statistics.fmean(len(each.unique()) for each in ids)


def described(given: dict[str, Any]) -> str:
    """Return a plan or tiles, if there are any, without the names of their kind."""
    parts = [
        asdict(each) for what in given.values() for each in (what if isinstance(what, tuple) else (what,))
    ]
    return str(parts).replace("'", "").replace("output_", "").strip("[]")


def measure(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    hidden, ffn, count, top_k, activation = SHAPES[args.shape]
    gated = activation not in UNGATED
    dtype = torch.bfloat16
    for scheme in args.schemes:
        layers = [
            empty_layer(scheme, hidden, ffn, count, dtype, device, gated=gated) for _ in range(args.layers)
        ]
        most = max(args.rows)
        decode_rows = (rows for rows in args.rows if rows <= launch.MAX_DECODE_ROWS)
        most_decode = max(SHORT_PROMPT_ROWS, max(decode_rows, default=0))
        fewer: Tensor | None = None
        for rows in sorted(args.rows):
            copies = args.layers * (4 if rows == 1 else 1)
            ids = [drawn_ids(most, count, top_k, 100 + idx, device)[:rows] for idx in range(copies)]
            x = torch.randn(max(args.rows), hidden, generator=torch.Generator().manual_seed(9))[:rows].to(
                device, dtype
            )
            weights = torch.full((rows, top_k), 1 / top_k, device=device)
            hit = experts_hit(ids)
            num_bytes = hit * layers[0].bytes_per_expert
            floor_us = num_bytes / BANDWIDTH * 1e6
            expected: Tensor | None = None
            known = None if scheme in ("BF16", "F16") else scheme
            for name, fn, given in plans_of(
                layers[0], known, rows, top_k, activation, most=most_decode, sweep=args.sweep
            ):
                launches = [
                    partial(
                        fn,
                        x,
                        layers[idx % args.layers],
                        ids[idx],
                        weights,
                        **given,
                        activation=activation,
                        residual_TD=x,
                    )
                    for idx in range(copies)
                ]
                row = {"scheme": scheme, "rows": rows, "plan": name, "hit": hit, "tiles": described(given)}
                try:
                    with poisoned_memory():
                        out = launches[0]()
                    if args.warm:
                        continue
                    timing = time_launches(launches, device, replays=args.replays)
                except (
                    triton.runtime.errors.OutOfResources,
                    RuntimeError,
                ) as error:  # a tile that does not fit is a result of a sweep
                    yield row | {"error": str(error)[:200]}
                    continue
                same = None
                if rows <= launch.MAX_DECODE_ROWS:
                    expected = out if expected is None else expected
                    same = torch.equal(out, expected)
                    same = same and (fewer is None or torch.equal(out[: len(fewer)], fewer))
                    fewer = out if name == "served" else fewer
                yield row | {
                    "us": timing.us,
                    "us_p10": timing.us_p10,
                    "us_p90": timing.us_p90,
                    "floor_us": floor_us,
                    "times_floor": timing.us / floor_us,
                    "same_bits": same,
                    "tflop_per_s": (6 if gated else 4) * rows * top_k * hidden * ffn / timing.us / 1e6,
                }
        layers.clear()
        torch.cuda.empty_cache()


def measure_router(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    hidden, _, count, top_k, _ = SHAPES[args.shape]
    facts = Experts(count, top_k, 1, renormalize=True)
    routers = [
        router_weights(torch.randn(count, hidden), None, None, dtype=torch.bfloat16, device=device)
        for _ in range(160)
    ]
    for rows in args.rows:
        x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
        fn = warps.route if rows <= launch.MAX_DECODE_ROWS else router_fused.route_many
        timing = time_launches(
            [partial(fn, x, each, facts) for each in routers], device, replays=args.replays
        )
        yield {"scheme": "router", "rows": rows, **timing.as_json()}


def short(row: dict[str, Any]) -> str:
    if "us" not in row:
        return json.dumps(row)
    text = f"{row['scheme']:<12} {row['rows']:>5} rows {row['us']:>8.1f} us"
    if "floor_us" in row:
        text += (
            f" ({row['us_p10']:.1f}-{row['us_p90']:.1f}) floor {row['floor_us']:.1f}"
            f" x{row['times_floor']:.2f} {row['tflop_per_s']:.0f} TF {row['plan']} {row['tiles']}"
            f" bits {row['same_bits']}"
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=list(SHAPES))
    parser.add_argument("--schemes", nargs="*", default=["W4A16_G128", "FP8_BLOCK", "FP8_DYNAMIC", "BF16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 128, 2048])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compile all that would be timed")
    args = parser.parse_args()
    device = torch.device("cuda")
    results: list[dict[str, Any]] = []
    good = True
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "shape": SHAPES[args.shape],
        "bandwidth_of_floor": BANDWIDTH,
    }
    print(json.dumps(facts), flush=True)
    if not args.no_checks:
        for row in (*router_checks(device), *checks(device)):
            print(json.dumps(row), flush=True)
            results.append(row)
            good = good and row["same_bits"]
    for row in () if args.warm else measure_router(args, device):
        print(short(row), flush=True)
        results.append(row)
    for row in measure(args, device):
        print(short(row), flush=True)
        results.append(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**facts, "results": results}, indent=1, default=str))
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
