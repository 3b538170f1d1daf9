"""How long indexers take to choose the keys of long contexts, beside the reference.

    python -m scripts.bench_indexers --out benchmarks/h200/indexers.json
    python -m scripts.bench_indexers --indexers tiny --contexts 64 --rows 1 2

Rows are decode steps of sequences of their own, whose table of blocks has room for the longest context as
that of a captured step has, or the last rows of one prompt (`--prompt-rows`). In every case the choice of
some rows is checked: no score that is left out is larger than one that is chosen, in float64, by more than a
part of the largest. Times are of CUDA-graph replays over several copies of the index keys: the median, with
the 10th and 90th percentile. The floor is the bytes of the index keys, read once for each sequence, over the
bandwidth measured.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.paged_latents import PagedLatents, slots_of
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import KernelDevice
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, candidates, select
from compress.machine import measure_bandwidth
from compress.models.block_choice import keys_of_blocks, num_attended, rotate_first
from compress.models.indexer import BlockIndexer, Indexer
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    write_results,
)
from scripts.kernel_bench.timer import num_copies, poisoned_memory, time_launches

INDEXERS: dict[str, Indexer | BlockIndexer] = {
    "deepseek-v3.2": Indexer(64, 128, top_k=2048),
    "a.x-k2": Indexer(16, 128, top_k=2048),
    "minimax-m3": BlockIndexer(4, 128, block_size=128, top_blocks=16),
    "qwen4-exp": BlockIndexer(8, 128, block_size=16, top_blocks=128, pooled=True),
    "tiny": Indexer(4, 32, top_k=32),
    "tiny blocks": BlockIndexer(2, 32, block_size=8, top_blocks=3),
    "tiny pooled": BlockIndexer(2, 32, block_size=4, top_blocks=3, pooled=True),
}
"""Those that models have, and small ones."""
BLOCK_SIZE = 64
"""Positions of a block of the cache."""
ROTARY = 64
"""Dimensions that rotate, at most."""
MOST_REFERENCE = 1 << 21
"""Positions of the tables of all rows up to which the reference is timed, too."""
MOST_COPIES = 8
CHECKED_ROWS = 3
MARGIN = 2e-2
"""By how much of the largest score one that is left out may exceed one that is chosen: means of pooled keys
are rounded to the type of the model, and sums of another order may round otherwise."""


@dataclass(frozen=True)
class Case:
    """One choice: the arguments of a kernel, and how many of the slots count in each row."""

    facts: Indexer | BlockIndexer
    q: Tensor
    other: Any
    pages: PagedLatents
    table_TB: Tensor
    ends_T: Tensor
    num_bytes: int

    def run(self, kernel: Kernel) -> Tensor:
        """Return the slots [T, N or 1, K] that a kernel chooses."""
        rows = self.pages, self.table_TB, self.ends_T
        if isinstance(self.facts, Indexer):
            slots: Tensor = kernel.fn(self.q, self.other, *rows, top_k=self.facts.top_k)
            return slots.unsqueeze(1)
        blocks: Tensor = kernel.fn(self.q, self.other, *rows)
        return blocks

    def count(self, row: int) -> int:
        """Return how many slots of a row count."""
        end = self.ends_T[row]
        if isinstance(self.facts, Indexer):
            return int(end.clamp(max=self.facts.top_k))
        return int(num_attended(self.facts, end - 1))

    def scores(self, row: int) -> Tensor:
        """Return the scores of a row, float64 [N or 1, units]: of the positions that it sees, or of its
        blocks, infinity where they are always chosen."""
        keys_PI = self.pages.rows[0].flatten(0, 1)[self.slots(row)]
        q = self.q[row].to(torch.float64)
        if isinstance(self.facts, Indexer):
            of_heads = (q @ keys_PI.to(torch.float64).mT).clamp(min=0)
            return (self.other[row].to(torch.float64) @ of_heads).unsqueeze(0)
        facts = self.facts
        products = q @ keys_of_blocks(facts, keys_PI, self._turned).to(torch.float64).mT
        if facts.pooled:
            return products.clamp(min=0).sum(dim=0, keepdim=True)
        missing = -products.shape[1] % facts.block_size
        whole = torch.nn.functional.pad(products, (0, missing), value=-torch.inf)
        largest = whole.unflatten(1, (-1, facts.block_size)).amax(dim=2)
        largest[:, largest.shape[1] - facts.local_blocks :] = torch.inf
        return largest

    def slots(self, row: int) -> Tensor:
        """Return the slots of the positions that a row sees."""
        positions = torch.arange(int(self.ends_T[row]), device=self.q.device).view(1, 1, -1)
        return slots_of(positions, self.table_TB[row : row + 1], BLOCK_SIZE).flatten()

    def _turned(self, means: Tensor, starts: Tensor) -> Tensor:
        keys = self.other
        normed = rms_norm(means, keys.norm.weight, keys.norm.eps).unsqueeze(-2)
        return rotate_first(normed, keys.cos_LC[starts], keys.sin_LC[starts], keys.rotary_dim).squeeze(-2)


def case_of(
    facts: Indexer | BlockIndexer, context: int, num_rows: int, width: int, device: torch.device
) -> Case:
    """Return a case of rows at the end of contexts of their own, in tables with room for `width` positions;
    or of the last rows of one prompt where that is 0."""
    dtype = model_dtype(device)
    num_sequences = num_rows if width else 1
    num_blocks = -(-context // BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(1)

    def randn(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(of)

    pages = PagedLatents(randn(1, num_sequences * num_blocks + 1, BLOCK_SIZE, facts.head_dim))
    table = torch.arange(1, num_sequences * num_blocks + 1, device=device).view(num_sequences, -1)
    table = torch.nn.functional.pad(table, (0, max(0, -(-width // BLOCK_SIZE) - num_blocks)))
    ends_T = torch.full((num_rows,), context, device=device)
    if not width:
        ends_T -= torch.arange(num_rows - 1, -1, -1, device=device)
    num_bytes = num_sequences * context * facts.head_dim * dtype.itemsize
    if isinstance(facts, Indexer):
        other: Any = randn(num_rows, facts.num_heads, of=torch.float32)
    else:
        angles = randn(context, ROTARY, of=torch.float32)
        norm = RowNorm(randn(facts.head_dim), 1e-6)
        rotary = min(ROTARY, facts.head_dim)
        other = BlockKeys(facts, norm, rotary, angles.cos().to(dtype), angles.sin().to(dtype))
    q = randn(num_rows, facts.num_heads, facts.head_dim)
    return Case(facts, q, other, pages, table.expand(num_rows, -1).contiguous(), ends_T, num_bytes)


def margin(case: Case, kernel: Kernel) -> float:
    """Return by how much of the largest score one that a kernel leaves out exceeds one that it chooses, the
    most of some rows; infinity where it does not choose as many as it should, or twice the same."""
    with poisoned_memory():
        slots_TNK = case.run(kernel)
    num_rows = len(case.q)
    size = 1 if isinstance(case.facts, Indexer) else case.facts.block_size
    worst = 0.0
    for row in sorted({0, num_rows // 2, num_rows - 1})[:CHECKED_ROWS]:
        scores = case.scores(row)
        positions = torch.full((case.pages.rows[0, ..., 0].numel(),), -1, device=case.q.device)
        own = torch.arange(int(case.ends_T[row]), device=case.q.device)
        positions[case.slots(row)] = own
        for head, slots in enumerate(slots_TNK[row, :, : case.count(row)]):
            found = positions[slots]
            if found.min() < 0 or len(found.unique()) < len(found):
                return float("inf")
            chosen = torch.zeros(-(-len(own) // size), dtype=torch.bool, device=found.device)
            chosen[found // size] = True
            chosen = chosen[: scores.shape[1]]  # positions after the last whole block have no score
            if chosen.all():
                continue
            largest = scores[head][scores[head].isfinite()].abs().max()
            worst = max(worst, float((scores[head][~chosen].max() - scores[head][chosen].min()) / largest))
    return worst


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[dict[str, Any], Case]]:
    longest = max(args.contexts)
    for name in args.indexers:
        for context in args.contexts:
            prompts = [each for each in args.prompt_rows if each <= context]
            for num_rows, width in [(each, longest) for each in args.rows] + [(each, 0) for each in prompts]:
                what = {"indexer": name, "context": context, "rows": num_rows, "prompt": not width}
                what["table_positions"] = width or context
                yield what, case_of(INDEXERS[name], context, num_rows, width, device)


def measured(
    what: dict[str, Any], case: Case, device: torch.device, bandwidth: float, replays: int
) -> Iterator[dict[str, Any]]:
    """Yield a row of the kernel that serves, and one of the reference where the case is small enough."""
    op = "index_choice" if isinstance(case.facts, Indexer) else "block_choice"
    problem = KernelDevice.from_torch(device, model_dtype(device)).problem(
        op, n=case.facts.head_dim, k=case.facts.num_heads
    )
    serving = select(problem)
    reference = next(each for each in candidates(op) if each.name == "reference")
    small = what["table_positions"] * what["rows"] <= MOST_REFERENCE
    copies = [
        replace(case, pages=PagedLatents(case.pages.rows.clone()))
        for _ in range(min(MOST_COPIES, num_copies(case.num_bytes, device)))
    ]
    for kernel in dict.fromkeys((serving, reference)) if small else (serving,):
        times = time_launches([partial(each.run, kernel) for each in copies], device, replays=replays)
        yield {
            "tool": "compress",
            **what,
            "kernel": kernel.name,
            "us": times.us,
            "us_p10": times.us_p10,
            "us_p90": times.us_p90,
            "floor_us": case.num_bytes / bandwidth * 1e6,
            "margin": margin(case, kernel),
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["indexer", "context", "rows", "kernel", "us", "p10", "p90", "floor us", "margin"]
    cells = [
        [
            row["indexer"],
            str(row["context"]),
            f"{row['rows']}{' of a prompt' if row['prompt'] else ''}",
            row["kernel"],
            *(f"{row[each]:.1f}" for each in ("us", "us_p10", "us_p90", "floor_us")),
            f"{row['margin']:.1e}" + ("" if row["margin"] <= MARGIN else " WRONG"),
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
    if any(row["margin"] > MARGIN for row in rows):
        sys.exit("The cases marked WRONG leave out scores that are larger than chosen ones.")


if __name__ == "__main__":
    main()
