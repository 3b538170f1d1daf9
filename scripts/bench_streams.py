"""How long gated residuals take to read their streams before a half-layer and to add its output after it.

    python -m scripts.bench_streams --out benchmarks/h200/streams.json
    python -m scripts.bench_streams --shapes tiny --rows 1 3 130

Up to 128 rows are those of a decode step, more are those of a prompt. `gated_mix` is timed beside its
reference, and `hyper_spread` after it, over streams that stay in the cache, as after a half-layer. `error` is
||out - reference|| / ||reference|| against float64, the larger one of the mixture and of the factors. Times
are of CUDA-graph replays over several copies of the matrices: the median, with the 10th and 90th percentile.
The floor is the bytes of matrices, streams and outputs over the bandwidth measured.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import KernelDevice, Phase
from compress.kernels.select import Kernel, candidates, select
from compress.machine import measure_bandwidth
from compress.models.gated_residual import GatedResiduals
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    write_results,
)
from scripts.kernel_bench.case import DECODE_ROWS, relative_error
from scripts.kernel_bench.timer import num_copies, poisoned_memory, time_launches

SHAPES = {
    "qwen4-exp": (2048, GatedResiduals(num_streams=4, rank=320)),
    "tiny": (48, GatedResiduals(num_streams=3, rank=20)),
}
"""The hidden sizes and the residuals that models have, and small ones."""


@dataclass(frozen=True)
class Case:
    """The streams of some rows before a half-layer, and its gated residual: W_down, W_up and W_q."""

    streams_TE: Tensor
    matrices: tuple[Tensor, Tensor, Tensor]
    norm: RowNorm
    packed: Any = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the matrices, of the streams and of the mixture."""
        matrices = sum(each.nbytes for each in self.matrices) + self.norm.weight.nbytes
        return matrices + self.streams_TE.nbytes + self.streams_TE.nbytes // len(self.norm.weight)

    def for_kernel(self, kernel: Kernel) -> "Case":
        """Return the case with a copy of the matrices in the layout of a kernel."""
        assert kernel.repack is not None
        x_TE = self.streams_TE
        copies = [each.clone() for each in self.matrices]
        packed = kernel.repack(copies, dtype=x_TE.dtype, device=x_TE.device, gated=False)
        return replace(self, packed=packed)

    def run(self, kernel: Kernel) -> tuple[Tensor, Tensor]:
        """Return the mixture and the factors of a kernel."""
        mixed_TD, factors_Tn = kernel.fn(self.streams_TE, self.packed, self.norm)
        return mixed_TD, factors_Tn

    def in_float64(self) -> tuple[Tensor, Tensor]:
        """Return the mixture and the factors."""
        down, up, inject = (each.double() for each in self.matrices)
        n = len(self.norm.weight)
        x = self.streams_TE.double().unflatten(1, (n, -1))
        normed = x / (x.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight.double()
        gates = torch.sigmoid(F.silu(normed.flatten(1) @ down.t() / n) @ up.t())
        mixed_TD = (gates.view_as(normed) * normed).mean(1)
        return mixed_TD, 2 * torch.sigmoid(normed.flatten(1) @ inject.t() / n)

    def error(self, kernel: Kernel) -> float:
        """Return the larger error of the mixture and of the factors."""
        with poisoned_memory():
            found = self.run(kernel)
        return max(map(relative_error, found, self.in_float64()))


def case_of(hidden_size: int, facts: GatedResiduals, num_rows: int, device: torch.device) -> Case:
    """Return a case of random numbers."""
    generator = torch.Generator(device).manual_seed(1)
    n = facts.num_streams

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(model_dtype(device))

    shapes = facts.shapes(hidden_size)
    down, up, inject = (
        randn(*shapes[f"{name}.weight"], scale=scale * shapes[f"{name}.weight"][1] ** -0.5)
        for name, scale in (("down", 2 * n), ("up", 2), ("inject", n))
    )
    weight_nD = 1 + 0.3 * randn(n, hidden_size).to(torch.float32)
    return Case(randn(num_rows, n * hidden_size), (down, up, inject), RowNorm(weight_nD, 1e-6))


def limit(case: Case) -> float:
    """Return the largest error of rounding: of normed streams, of gates and of the result, and of float32
    sums."""
    eps = torch.finfo(case.streams_TE.dtype).eps
    return 2 * eps + 16 * torch.finfo(torch.float32).eps * case.streams_TE.shape[1] ** 0.5


def measured(
    name: str, num_rows: int, device: torch.device, bandwidth: float, replays: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of the kernel that reads the streams, of its reference and of the kernel that adds to
    them."""
    hidden_size, facts = SHAPES[name]
    phase: Phase = "decode" if num_rows <= DECODE_ROWS else "prefill"
    target = KernelDevice.from_torch(device, model_dtype(device))
    problem = target.problem("gated_mix", n=hidden_size, k=facts.rank, phase=phase)
    case = case_of(hidden_size, facts, num_rows, device)
    serving = select(problem)
    reference = next(
        each
        for each in candidates("gated_mix")
        if each.name.startswith("reference") and each.refusal(problem) is None
    )
    what = {"tool": "compress", "shape": name, "rows": num_rows, "phase": phase}
    for kernel in dict.fromkeys((serving, reference)):
        copies = [case.for_kernel(kernel) for _ in range(num_copies(case.num_bytes, device))]
        times = time_launches([partial(each.run, kernel) for each in copies], device, replays=replays)
        yield {
            **what,
            "op": "gated_mix",
            "kernel": kernel.name,
            **times.as_json(),
            "floor_us": case.num_bytes / bandwidth * 1e6,
            "error": copies[0].error(kernel),
            "limit": limit(case),
        }
    spread = select(target.problem("hyper_spread", n=hidden_size, k=facts.num_streams))
    y_TD, factors_Tn = case.for_kernel(serving).run(serving)
    launch = partial(spread.fn, y_TD, case.streams_TE, factors_Tn)
    num_bytes = 2 * case.streams_TE.nbytes + y_TD.nbytes
    times = time_launches([launch] * num_copies(num_bytes, device), device, replays=replays)
    after = case.streams_TE.double().unflatten(1, (facts.num_streams, -1))
    after = after + factors_Tn.double().unsqueeze(-1) * y_TD.double().unsqueeze(1)
    with poisoned_memory():
        error = relative_error(launch(), after.flatten(1))
    yield {
        **what,
        "op": "hyper_spread",
        "kernel": spread.name,
        **times.as_json(),
        "floor_us": num_bytes / bandwidth * 1e6,
        "error": error,
        "limit": limit(case),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["shape", "rows", "op", "kernel", "us", "p10", "p90", "floor us", "error"]
    cells = [
        [
            row["shape"],
            str(row["rows"]),
            row["op"],
            row["kernel"],
            *(f"{row[each]:.1f}" for each in ("us", "us_p10", "us_p90", "floor_us")),
            f"{row['error']:.1e}" + ("" if _passes(row) else " WRONG"),
        ]
        for row in rows
    ]
    return markdown(header, cells)


def _passes(row: dict[str, Any]) -> bool:
    return math.isfinite(row["error"]) and row["error"] <= row["limit"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen4-exp"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 2048])
    parser.add_argument("--replays", type=int, default=15)
    args: argparse.Namespace = parse_arguments(parser, lambda document: table(document["rows"]))
    device = pick_device()
    bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
    rows: list[dict[str, Any]] = []
    try:
        with torch.inference_mode():
            for name in args.shapes:
                for num_rows in args.rows:
                    rows += measured(name, num_rows, device, bandwidth, args.replays)
    finally:
        if args.out is not None:
            facts = {"bandwidth_bytes_per_s": bandwidth}
            write_results(args.out, rows, device=device, commit=args.commit, facts=facts)
        print(table(rows))
    if not all(map(_passes, rows)):
        sys.exit("The cases marked WRONG differ from the result in float64 by more than rounding.")


if __name__ == "__main__":
    main()
