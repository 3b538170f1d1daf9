"""Kernels of compressed attention: the reference's numbers within rounding, and rows whose bits depend on
their sequence alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.compressed_attention import entry_sums, paged, reference
from compress.kernels.compressed_store import reference as reference_store
from compress.kernels.operands import index_keys
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.select import Kernel
from compress.models.compressed import Compressed
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import DEVICES, usable

BLOCK_SIZE, ROPE_DIM = 16, 8
LENGTHS = (1, 18, 131)
OF_FEW, OF_MANY = Compressed(16, 8, 1, 16, rate=4, overlaps=True), Compressed(16, 8, 1, 16, rate=37)
SHAPES = {
    "no entries": (Compressed(16, 8, 1, 16), 3, 24, None),
    "entries of 4": (OF_FEW, 5, 16, None),
    "chosen": (OF_FEW, 5, 16, 7),
    "all chosen": (OF_FEW, 18, 32, 100),
    "entries of 37": (OF_MANY, 3, 40, None),
}
"""Facts, query heads, their dimensions, and entries that are chosen."""
INDEX_HEADS, INDEX_DIM = 3, 16
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 3e-3, "atol": 3e-3}}

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or triton's interpreter"
)
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_case = pytest.mark.parametrize(
    ("shape", "dtype", "kv_format"),
    [
        *((shape, torch.float32, "F32") for shape in SHAPES),
        ("chosen", torch.float16, "F16"),
        ("chosen", torch.float32, "FP8_TOKEN_HEAD"),
        ("entries of 37", torch.float16, "INT8_TOKEN_HEAD"),
    ],
    ids=lambda each: str(each).removeprefix("torch."),
)


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


def randn(*size: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Passes:
    """Passes over sequences of `LENGTHS` positions, of which each has its last rows."""

    def __init__(self, shape: str, dtype: torch.dtype, kv_format: str, device: str) -> None:
        self.facts, self.num_heads, self.head_dim, self.top_entries = SHAPES[shape]
        self.dtype, self.device = dtype, device
        num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
        order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
        self.table = order.view(len(LENGTHS), -1).to(device, torch.int32)
        width = self.head_dim + self.facts.raw_width(self.head_dim)
        if self.top_entries:
            width += self.facts.raw_width(INDEX_DIM)
        num_slots = (1 + len(order)) * BLOCK_SIZE
        self.pages = PagedLatents.empty(kv_format, 1 + len(order), BLOCK_SIZE, width, torch.device(device))
        rows = randn(num_slots, width, seed=3, device=device, dtype=dtype)
        self.pages.write_(torch.arange(num_slots, device=device), rows)
        angles = randn(max(LENGTHS) + 1, ROPE_DIM // 2, seed=4, device=device).repeat(1, 2)
        self.tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def weights(self, head_dim: int, seed: int) -> EntryWeights:
        places = randn(self.facts.rate, self.facts.raw_width(head_dim) // 2, seed=seed, device=self.device)
        norm = randn(head_dim, seed=seed + 1, device=self.device, dtype=self.dtype)
        return EntryWeights(self.facts, places, RowNorm(norm, 1e-5))

    def attended(self, fn: Any, sequences: list[int], num_rows: int = 2, columns: int = 0) -> Tensor:
        """Return [sequences, rows, H, C] of the last rows of some sequences, the first of which is made
        twice where a sequence is shorter."""
        table = self.table[sequences, : -(-max(LENGTHS[each] for each in sequences) // BLOCK_SIZE)]
        last = torch.tensor([LENGTHS[each] for each in sequences]) - 1
        back = torch.arange(num_rows - 1, -1, -1)
        positions = (last.unsqueeze(1) - back).clamp(min=0).flatten().to(self.device)

        def of_rows(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
            every = randn(len(LENGTHS), 2, *size, seed=seed, device=self.device, dtype=dtype)
            return every[sequences, 2 - num_rows :].flatten(0, 1)

        choice = None
        if self.top_entries:
            queries = of_rows(INDEX_HEADS, INDEX_DIM, seed=7, dtype=self.dtype)
            factors = of_rows(INDEX_HEADS, seed=8)
            choice = EntryChoice(self.weights(INDEX_DIM, 10), self.top_entries, queries, factors)
        out: Tensor = fn(
            of_rows(self.num_heads, self.head_dim, seed=6, dtype=self.dtype),
            self.pages,
            self.weights(self.head_dim, 12) if self.facts.rate else None,
            *self.tables,
            torch.nn.functional.pad(table, (0, columns)),
            torch.arange(len(sequences), device=self.device).repeat_interleave(num_rows),
            positions,
            window=19,
            scale=0.3,
            sinks_H=randn(self.num_heads, seed=9, device=self.device),
            choice=choice,
        )
        return out.unflatten(0, (len(sequences), num_rows))


@usable("compressed_attention", n=32, k=8)
@each_case
def test_attention_is_that_of_the_reference(
    shape: str, dtype: torch.dtype, kv_format: str, kernel: Kernel, device: str
) -> None:
    passes = Passes(shape, dtype, kv_format, device)
    every = list(range(len(LENGTHS)))
    expected = passes.attended(reference.compressed_attention, every)
    torch.testing.assert_close(passes.attended(kernel.fn, every), expected, **CLOSE[dtype])


@usable("compressed_attention", n=32, k=8)
@each_shape
def test_a_row_has_its_bits_in_any_company(shape: str, kernel: Kernel, device: str) -> None:
    passes = Passes(shape, torch.float16, "F16", device)
    every = list(range(len(LENGTHS)))
    whole = passes.attended(kernel.fn, every)
    for sequences in ([2], [1, 0], every[::-1]):
        assert torch.equal(passes.attended(kernel.fn, sequences), whole[sequences])
    assert torch.equal(passes.attended(kernel.fn, every, num_rows=1), whole[:, 1:])
    assert torch.equal(passes.attended(kernel.fn, every, columns=9), whole)


@needs_triton
@pytest.mark.parametrize("shape", ["chosen", "entries of 37"])
def test_few_programs_take_entries_in_turn(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(shape, torch.float16, "F16", DEVICES[-1])
    every = [2, 0, 1]
    whole = passes.attended(paged.compressed_attention, every)
    monkeypatch.setattr(entry_sums, "PROGRAMS", 5)
    monkeypatch.setattr(entry_sums, "LEAST_SEQUENCES", 1)
    monkeypatch.setattr(index_keys, "PROGRAMS", 2)
    assert torch.equal(passes.attended(paged.compressed_attention, every), whole)


@usable("compressed_store", n=32, k=8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_raw"), [(24, 0), (40, 80), (16, 1100)])
@pytest.mark.parametrize("norm_dtype", [torch.float32, None], ids=["float32 norm", "norm of the model"])
def test_what_the_cache_takes_is_what_the_reference_writes(
    norm_dtype: torch.dtype | None,
    head_dim: int,
    num_raw: int,
    dtype: torch.dtype,
    kernel: Kernel,
    device: str,
) -> None:
    num_rows, num_heads = 5, 3
    angles = randn(30, ROPE_DIM // 2, seed=1, device=device).repeat(1, 2)
    norm = RowNorm(randn(head_dim, seed=2, device=device, dtype=norm_dtype or dtype), 1e-5)
    first = randn(num_rows, 7 + head_dim, seed=3, device=device, dtype=dtype)
    raw = randn(num_rows, num_raw + 3, seed=4, device=device, dtype=dtype)[:, :num_raw]

    def stored(fn: Any) -> tuple[Tensor, Tensor]:
        name = "F32" if dtype == torch.float32 else "F16"
        pages = PagedLatents.empty(name, 3, BLOCK_SIZE, head_dim + num_raw, torch.device(device))
        pages.rows.fill_(7)
        q = fn(
            randn(num_rows, num_heads * head_dim, seed=5, device=device, dtype=dtype),
            first[:, 7:],
            raw if num_raw else None,
            norm,
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            torch.tensor([0, 3, 29, 7, 7], device=device),
            torch.tensor([40, 1, 2, 17, 30], device=device),
            pages,
        )
        return q, pages.rows

    (q, rows), (expected_q, expected_rows) = stored(kernel.fn), stored(reference_store.compressed_store)
    torch.testing.assert_close(q, expected_q, **CLOSE[dtype])
    torch.testing.assert_close(rows, expected_rows, **CLOSE[dtype])
    assert torch.equal(rows == 7, expected_rows == 7)
