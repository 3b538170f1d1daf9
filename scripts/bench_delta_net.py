"""How long the kernels of gated delta nets take: what stands between the linears of one layer.

    python -m scripts.bench_delta_net --model qwen3.5-9b --out benchmarks/delta_net_cpu.json

Every kernel that serves the device is timed with one row, as in decode, and with prompts of `--rows`, one
after the other in each round: medians, with the least and the largest. `error` is the median of the outputs'
distance from those of the reference, relative to their size (0.1 at least).
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from compress.kernels.operands.recurrent_states import DeltaWeights, RecurrentStates, Sequences
from compress.kernels.problem import KernelDevice
from compress.kernels.select import Kernel, candidates
from compress.models.delta_net import DeltaNet
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)


class Case:
    """Rows of one sequence in a delta net with random parameters."""

    def __init__(self, delta: DeltaNet, num_rows: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(num_rows)
        dtype = model_dtype(device)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.rows = 0.3 * randn(num_rows, delta.num_channels + delta.value_size).to(dtype)
        self.beta_decay = randn(num_rows, delta.num_heads + delta.num_decays)
        self.weights = DeltaWeights(
            0.3 * randn(delta.num_channels, delta.kernel_size).to(dtype),
            -randn(delta.num_heads).exp(),
            randn(delta.num_decays),
            torch.ones(delta.value_dim, dtype=dtype, device=device),
            1e-6,
        )
        self.states = RecurrentStates.empty(delta, 2, 1, device)
        slots_R = torch.tensor([1], device=device)
        lens_R = torch.tensor([num_rows], dtype=torch.int32, device=device)
        self.sequences = (
            Sequences.of_decode(slots_R, lens_R, 1)
            if num_rows == 1
            else Sequences.of_prefill(slots_R, (num_rows,), (num_rows,))
        )

    def run(self, kernel: Kernel) -> torch.Tensor:
        """Return the outputs of a pass that begins the sequence."""
        out: torch.Tensor = kernel.fn(self.rows, self.beta_decay, self.weights, self.states, self.sequences)
        return out

    def seconds(self, kernel: Kernel) -> float:
        """Return how long a pass takes."""
        device = self.rows.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        self.run(kernel)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s


def measure(delta: DeltaNet, num_rows: int, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each kernel."""
    case = Case(delta, num_rows, device)
    problem = KernelDevice.from_torch(device, model_dtype(device)).problem(
        "delta_net", n=delta.key_dim, k=delta.value_dim
    )
    kernels = {each.name: each for each in candidates("delta_net") if each.refusal(problem) is None}
    expected = case.run(kernels["reference"]).to(torch.float32)
    found: dict[str, list[float]] = {name: [] for name in kernels}
    errors = {}
    for name, kernel in kernels.items():
        distance = (case.run(kernel).to(torch.float32) - expected).abs() / expected.abs().clamp_min(0.1)
        errors[name] = float(distance.median())
    for _ in range(repeats):
        for name, kernel in kernels.items():
            found[name].append(1e3 * case.seconds(kernel))
    return [
        {
            "kernel": name,
            "num_rows": num_rows,
            "ms_p50": statistics.median(values),
            "ms_least": min(values),
            "ms_largest": max(values),
            "error": errors[name],
        }
        for name, values in found.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of these rows."""
    header = ["kernel", "rows", "ms, median", "least", "largest", "error"]
    return markdown(
        header,
        [
            [
                row["kernel"],
                str(row["num_rows"]),
                *(f"{row[key]:.3f}" for key in ("ms_p50", "ms_least", "ms_largest")),
                f"{row['error']:.1e}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    """Measure, print and write."""
    parser = argument_parser(__doc__ or "")
    parser.set_defaults(model="qwen3.5-9b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    device = pick_device()
    name, arch = read_arch(args.model)
    delta = next(each.recurrence for each in arch.layers if isinstance(each.recurrence, DeltaNet))
    rows = [row for count in args.rows for row in measure(delta, count, device, args.repeats)]
    facts = {"model": name, "threads": torch.get_num_threads(), "repeats": args.repeats}
    write_results(args.out, rows, device=device, commit=args.commit, facts=facts)
    print(table(rows))


if __name__ == "__main__":
    main()
