"""How long indexers take to choose the keys of long contexts, beside the reference.

    python -m scripts.bench_indexers --out benchmarks/h200/indexers.json
    python -m scripts.bench_indexers --indexers tiny --contexts 64 --rows 1 2

Every case is checked first: of what a kernel chooses and the reference does not, no score is smaller than the
reference's least by more than rounding. Rows are decode steps of sequences of their own, or those of one
prompt (`--prompt-rows`). Times are of CUDA-graph replays: the median, with the 10th and 90th percentile. The
floor is the bytes of the index keys, read once for each sequence, over the bandwidth measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import KernelDevice
from compress.kernels.select import Kernel, candidates, select
from compress.machine import measure_bandwidth
from compress.models.block_choice import num_attended
from compress.models.indexer import BlockIndexer, Indexer
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    write_results,
)
from scripts.kernel_bench.timer import poisoned_memory, time_launches

INDEXERS: dict[str, Indexer | BlockIndexer] = {
    "deepseek-v3.2": Indexer(64, 128, top_k=2048),
    "a.x-k2": Indexer(16, 128, top_k=2048),
    "minimax-m3": BlockIndexer(4, 128, block_size=128, top_blocks=16),
    "qwen4-exp": BlockIndexer(8, 128, block_size=16, top_blocks=128, pooled=True),
    "tiny": Indexer(4, 32, top_k=32),
    "tiny blocks": BlockIndexer(2, 32, block_size=8, top_blocks=3),
}
"""Those that models have, and small ones."""
BLOCK_SIZE = 16
"""Positions of a block of the cache."""
ROTARY = 64
"""Dimensions that rotate, at most."""
MOST_REFERENCE = 1 << 19
"""Positions of all rows up to which the reference is run, too."""
MOST_MISSED = 0.02
"""The part of the chosen positions that may differ from the reference's: scores that are alike in the
reference, which adds in another order."""


@dataclass(frozen=True)
class Case:
    """One choice: what `run` takes besides a kernel, and how many of its slots count in each row."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    counts: list[int]
    num_bytes: int

    def run(self, kernel: Kernel) -> Tensor:
        slots: Tensor = kernel.fn(*self.arguments, **self.options)
        return slots

    def chosen(self, kernel: Kernel) -> list[set[int]]:
        """Return the slots of each head of each row."""
        slots = self.run(kernel)
        heads = slots.unsqueeze(1) if slots.ndim == 2 else slots
        return [
            set(head[:count].tolist()) for row, count in zip(heads, self.counts, strict=True) for head in row
        ]


def case_of(
    facts: Indexer | BlockIndexer, context: int, num_rows: int, device: torch.device, *, prompt: bool
) -> Case:
    """Return a case of rows at the end of contexts of their own, or of the last rows of one `prompt`."""
    dtype = model_dtype(device)
    num_sequences = 1 if prompt else num_rows
    num_blocks = -(-context // BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(1)

    def randn(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(of)

    pages = PagedLatents(randn(1, num_sequences * num_blocks + 1, BLOCK_SIZE, facts.head_dim))
    table = torch.arange(1, num_sequences * num_blocks + 1, device=device, dtype=torch.int32)
    table_TB = table.view(num_sequences, -1).expand(num_rows, -1).contiguous()
    ends_T = torch.full((num_rows,), context, dtype=torch.int32, device=device)
    if prompt:
        ends_T -= torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=device)
    q = randn(num_rows, facts.num_heads, facts.head_dim)
    num_bytes = num_sequences * context * facts.head_dim * dtype.itemsize
    if isinstance(facts, Indexer):
        weights = randn(num_rows, facts.num_heads, of=torch.float32)
        counts = ends_T.clamp(max=facts.top_k).tolist()
        return Case((q, weights, pages, table_TB, ends_T), {"top_k": facts.top_k}, counts, num_bytes)
    angles = randn(context, ROTARY, of=torch.float32)
    rotary = min(ROTARY, facts.head_dim)
    norm = RowNorm(randn(facts.head_dim), 1e-6)
    keys = BlockKeys(facts, norm, rotary, angles.cos().to(dtype), angles.sin().to(dtype))
    counts = num_attended(facts, ends_T - 1).tolist()
    return Case((q, keys, pages, table_TB, ends_T), {}, counts, num_bytes)


def missed(case: Case, kernel: Kernel, reference: Kernel) -> float:
    """Return the part of the reference's choice that a kernel does not choose."""
    with poisoned_memory():
        pairs = list(zip(case.chosen(kernel), case.chosen(reference), strict=True))
    return sum(len(b - a) for a, b in pairs) / sum(len(b) for _, b in pairs)


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[dict[str, Any], Case]]:
    for name in args.indexers:
        for context in args.contexts:
            for num_rows, prompt in [(each, False) for each in args.rows] + [
                (each, True) for each in args.prompt_rows if each <= context
            ]:
                what = {"indexer": name, "context": context, "rows": num_rows, "prompt": prompt}
                yield what, case_of(INDEXERS[name], context, num_rows, device, prompt=prompt)


def measured(
    what: dict[str, Any], case: Case, device: torch.device, bandwidth: float, replays: int
) -> Iterator[dict[str, Any]]:
    """Yield a row of the kernel that serves, and one of the reference where the case is small enough."""
    facts = INDEXERS[what["indexer"]]
    op = "index_choice" if isinstance(facts, Indexer) else "block_choice"
    problem = KernelDevice.from_torch(device, model_dtype(device)).problem(
        op, n=facts.head_dim, k=facts.num_heads
    )
    serving = select(problem)
    reference = next(each for each in candidates(op) if each.name == "reference")
    small = what["context"] * what["rows"] <= MOST_REFERENCE
    part = missed(case, serving, reference) if small else None
    for kernel in dict.fromkeys((serving, reference)) if small else (serving,):
        launch: Callable[[], Any] = partial(case.run, kernel)
        times = time_launches([launch] * 4, device, replays=replays)
        yield {
            "tool": "compress",
            **what,
            "kernel": kernel.name,
            "us": times.us,
            "us_p10": times.us_p10,
            "us_p90": times.us_p90,
            "floor_us": case.num_bytes / bandwidth * 1e6,
            "missed": None if kernel is reference else part,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["indexer", "context", "rows", "kernel", "us", "p10", "p90", "floor us", "missed"]
    cells = [
        [
            row["indexer"],
            str(row["context"]),
            f"{row['rows']}{' of a prompt' if row['prompt'] else ''}",
            row["kernel"],
            *(f"{row[each]:.1f}" for each in ("us", "us_p10", "us_p90", "floor_us")),
            "" if row["missed"] is None else f"{row['missed']:.2%}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def main() -> None:
    parser = argument_parser(__doc__)
    known = [name for name in INDEXERS if not name.startswith("tiny")]
    parser.add_argument("--indexers", nargs="+", choices=list(INDEXERS), default=known)
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt-rows", nargs="*", type=int, default=[2048])
    parser.add_argument("--replays", type=int, default=15)
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    device = pick_device()
    bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
    rows: list[dict[str, Any]] = []
    try:
        with torch.inference_mode():
            for what, case in cases(args, device):
                rows += measured(what, case, device, bandwidth, args.replays)
    finally:
        if args.out is not None:
            facts = {"bandwidth_bytes_per_s": bandwidth}
            write_results(args.out, rows, device=device, commit=args.commit, facts=facts)
        print(table(rows))
    if any((row["missed"] or 0) > MOST_MISSED for row in rows):
        sys.exit(
            f"A kernel chooses others than the reference in more than {MOST_MISSED:.0%} of its positions."
        )


if __name__ == "__main__":
    main()
