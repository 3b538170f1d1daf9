"""How fast every kernel of a step is, at the sizes of one model, beside what the memory allows and beside
torch's own.

    python -m scripts.bench_kernels --out benchmarks/h200/kernels.json
    python -m scripts.bench_kernels --model qwen3-8b --ops linear --schemes W4A16_G128 --m 1 16

Kernels are chosen and weights repacked as the runtime does it. Each case is first checked against a
reference, with fresh memory poisoned, and the last launch of the timed graph is checked again; rows of one
kernel must have the same bits at every M up to 128. A case that fails is printed and ends the program with
exit code 1. Times are medians over CUDA-graph replays, per launch, over distinct memory
(`kernel_bench/timer.py`), with the 10th and 90th percentile.

    tb_per_s         bytes that the scheme stores, or keys and values, over time
    bandwidth_frac   of the read bandwidth measured in this run (`compress/machine.py`)
    curve_frac       of what a single launch can reach on an H200, t = 2.8 us + bytes / 4.16 TB/s, fitted to
                     plain reads of one tensor a launch, from 8 to 512 MB; above 1 means that a launch's ramps
                     hide behind its neighbours
    tflop_per_s      arithmetic over time, for prefill
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from compress.kernels.coverage import LINEARS
from compress.kernels.operands.paged import TOKEN_HEAD_FORMATS
from compress.kernels.operands.rows import QuantizedRows
from compress.machine import measure_bandwidth, measure_matmul_rate
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
    write_results,
)
from scripts.kernel_bench.attention import attention_decode_cases, attention_prefill_cases
from scripts.kernel_bench.case import Bench, Case
from scripts.kernel_bench.linear import linear_cases
from scripts.kernel_bench.rows import rope_store_cases, row_cases, sample_cases
from scripts.kernel_bench.timer import poisoned_memory, time_alone, time_launches

OPS = ("linear", "attention_decode", "attention_prefill", "rows", "rope_store", "sample")
DENSE = "dense"
SCHEMES = (DENSE, "FP8_DYNAMIC", "INT8_DYNAMIC", "W4A16_G128", "W4A16_G128_ASYM")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
REPLAYS = {"decode": 20, "prefill": 7}
BLOCK_SIZE = {"cuda": 64, "cpu": 16}


@dataclass(frozen=True)
class Rates:
    """Measured in this run: bytes and, in the dense dtype, arithmetic a second."""

    bandwidth_bytes_per_s: float
    matmul_flops_per_s: float


class BitsOfRows:
    """Whether rows keep their bits as others join them: each result is compared with the one of fewer rows
    before it."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], tuple[Tensor, ...]] = {}

    def kept(self, case: Case, output: Any) -> bool | None:
        """None where nothing is promised or nothing came before."""
        if case.tool != "compress" or case.phase != "decode" or case.op in ("attention_decode", "sample"):
            return None
        key = (case.op, case.name, case.scheme, case.kernel)
        tensors = (
            (output.values_TK.view(torch.uint8), output.scale_T)
            if isinstance(output, QuantizedRows)
            else (output,)
        )
        before = self._before.get(key)
        self._before[key] = tuple(each.clone() for each in tensors)
        return (
            None
            if before is None
            else all(torch.equal(new[: len(old)], old) for new, old in zip(tensors, before, strict=True))
        )


def cases(args: argparse.Namespace, bench: Bench) -> Iterator[Case]:
    schemes = [bench.dense if each == DENSE else each for each in args.schemes]
    kv_formats = tuple(bench.dense if each == DENSE else each for each in args.kv_formats)
    block_size = BLOCK_SIZE[bench.device.type]
    paged: dict[str, Any] = {"kv_formats": kv_formats, "block_size": block_size}
    makers = {
        "linear": lambda: linear_cases(bench, schemes, args.linears),
        "attention_decode": lambda: attention_decode_cases(
            bench, contexts=args.contexts, batch_sizes=args.batch_sizes, **paged
        ),
        "attention_prefill": lambda: attention_prefill_cases(bench, lengths=args.lengths, **paged),
        "rows": lambda: row_cases(bench),
        "rope_store": lambda: rope_store_cases(bench, **paged),
        "sample": lambda: sample_cases(bench, args.batch_sizes),
    }
    return chain.from_iterable(makers[op]() for op in args.ops)


def measure(case: Case, bench: Bench, rates: Rates, bits: BitsOfRows, *, alone: bool) -> dict[str, Any]:
    """One row of the result file."""
    with poisoned_memory():
        output = case.launches[0]()
    same_bits = bits.kept(case, output)
    error = None if case.error is None else case.error(output)
    sustained = case.phase == "prefill" and case.flops > 0
    timing = time_launches(
        case.launches, bench.device, replays=REPLAYS[case.phase], in_graph=case.in_graph, sustained=sustained
    )
    if case.error is not None and error is not None:
        error = max(error, case.error(timing.output))
    seconds = timing.us / 1e6
    cold = case.op in ("linear", "attention_decode") and case.phase == "decode"
    return {
        "tool": case.tool,
        "op": case.op,
        "name": case.name,
        "shape": list(case.shape),
        "scheme": case.scheme,
        "m": case.m,
        "phase": case.phase,
        "kernel": case.kernel,
        **timing.as_json(),
        "us_alone": time_alone(case.launches, bench.device, replays=REPLAYS[case.phase])
        if alone and cold
        else None,
        "bytes": case.num_bytes,
        "tb_per_s": case.num_bytes / seconds / 1e12,
        "bandwidth_frac": case.num_bytes / seconds / rates.bandwidth_bytes_per_s if cold else None,
        "curve_frac": (H200_LAUNCH_S + case.num_bytes / H200_LAUNCH_BYTES_PER_S) / seconds
        if cold and is_h200(bench.device)
        else None,
        "tflop_per_s": case.flops / seconds / 1e12,
        "error": error,
        "error_limit": None if error is None else case.limit,
        "same_bits": same_bits,
        "passed": same_bits is not False and (error is None or error <= case.limit),
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """One table an op and phase: a line is a thing, a column a size, a cell what `_cell` says."""
    blocks = []
    for op, phase in dict.fromkeys((row["op"], row["phase"]) for row in rows):
        chosen = [row for row in rows if (row["op"], row["phase"]) == (op, phase)]
        sizes = sorted({row["m"] for row in chosen})
        lines: dict[tuple[str, ...], dict[int, str]] = {}
        for row in chosen:
            lines.setdefault((row["name"], row["scheme"], row["kernel"]), {})[row["m"]] = _cell(row)
        body = [[" ".join(what), *(cells.get(size, "") for size in sizes)] for what, cells in lines.items()]
        unit = "TFLOP/s" if _by_arithmetic(chosen[0]) else "TB/s"
        blocks.append(
            markdown(
                [f"{op}, us {unit}", *(f"{'T' if phase == 'prefill' else 'M'}={size}" for size in sizes)],
                body,
            )
        )
    return "\n\n".join(blocks)


def _cell(row: dict[str, Any]) -> str:
    """Microseconds, rate, and where bytes decide the shares of bandwidth and curve in percent."""
    rate = row["tflop_per_s"] if _by_arithmetic(row) else row["tb_per_s"]
    shares = "/".join(
        f"{row[name] * 100:.0f}" for name in ("bandwidth_frac", "curve_frac") if row[name] is not None
    )
    parts = [
        f"{row['us']:.4g}",
        f"{rate:.0f}" if rate >= 100 else f"{rate:.2f}",
        shares and f"{shares}%",
        "" if row["passed"] else "WRONG",
    ]
    return " ".join(part for part in parts if part)


def _by_arithmetic(row: dict[str, Any]) -> bool:
    return bool(row["phase"] == "prefill" and row["tflop_per_s"])


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--linears", nargs="+", default=list(LINEARS), choices=list(LINEARS))
    parser.add_argument(
        "--schemes", nargs="+", default=list(SCHEMES), help=f"'{DENSE}' is the dtype of the model"
    )
    parser.add_argument(
        "--m",
        nargs="+",
        type=int,
        default=list(ROWS),
        help="rows of linears and row-wise ops; above 128 is prefill",
    )
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=[1, 16, 64], help="requests of attention and sampling"
    )
    parser.add_argument(
        "--kv-formats",
        nargs="+",
        default=[DENSE, *TOKEN_HEAD_FORMATS],
        help=f"of the cache; '{DENSE}' is the dtype of the model",
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[580, 8192], help="of decode attention")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="of prefill attention")
    parser.add_argument(
        "--alone", action="store_true", help="also time launches that their neighbours do not overlap"
    )
    return parse_arguments(parser, lambda document: tables(document["rows"]))


def main() -> None:
    args = arguments()
    device = pick_device()
    name, arch = read_arch(args.model)
    bench = Bench(arch, device, model_dtype(device), tuple(sorted(args.m)))
    small = device.type == "cpu"
    rates = Rates(
        measure_bandwidth(device, size_bytes=1 << 26 if small else None),
        measure_matmul_rate(device, bench.dtype, size=256 if small else None),
    )
    started_s = time.perf_counter()
    rows = []
    bits = BitsOfRows()
    try:
        with torch.inference_mode():
            for case in cases(args, bench):
                rows.append(measure(case, bench, rates, bits, alone=args.alone))
                if not rows[-1]["passed"]:
                    print(f"WRONG: {rows[-1]}", file=sys.stderr, flush=True)
    finally:  # what was measured before a failure is kept
        if args.out is not None:
            write_results(
                args.out, rows, device=device, commit=args.commit, facts={"model": name, **vars(rates)}
            )
        print(tables(rows))
    tera_flops = rates.matmul_flops_per_s / 1e12
    measured = (
        f"reads {rates.bandwidth_bytes_per_s / 1e12:.2f} TB/s, "
        f"multiplies {tera_flops:.0f} TFLOP/s in {bench.dense}"
    )
    print(f"{name}: {len(rows)} cases in {time.perf_counter() - started_s:.0f} s; this device {measured}")
    wrong = sum(not row["passed"] for row in rows)
    if wrong:
        sys.exit(f"{wrong} of {len(rows)} cases are wrong; they are listed above.")


if __name__ == "__main__":
    main()
