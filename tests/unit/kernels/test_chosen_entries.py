"""The entries that an indexer chooses in compressed attention over pages: against the arithmetic of one row
after the other in float64, and the laws of a choice."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compress.kernels.compressed_attention import entries as computed_entries
from compress.kernels.compressed_attention import paged, reference
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.select import Kernel
from compress.models.compressed import Compressed
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import usable

FACTS = Compressed(16, 6, 1, 16, rate=3, overlaps=True)
HEADS, DIM, INDEX_HEADS, INDEX_DIM = 3, 10, 4, 8
LENGTH, WINDOW, SCALE = 200, 7, 0.3
BLOCK = 16


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """The cache of two sequences of `LENGTH` positions, and rows of them."""

    pages: PagedLatents
    table: Tensor
    weights: EntryWeights
    scored: EntryWeights
    tables: tuple[Tensor, Tensor]
    sequence: Tensor
    positions: Tensor
    q: Tensor
    index_q: Tensor
    factors: Tensor
    sinks: Tensor
    kernel: Kernel
    device: str

    def attended(self, top_entries: int | None, *, columns: int = 0) -> Tensor:
        def sent(each: Tensor) -> Tensor:
            return each.to(self.device)

        def weights(each: EntryWeights) -> EntryWeights:
            return EntryWeights(FACTS, sent(each.positions), RowNorm(sent(each.norm.weight), each.norm.eps))

        choice = None
        if top_entries is not None:
            queries = sent(self.index_q), sent(self.factors)
            choice = EntryChoice(weights(self.scored), top_entries, *queries)
        out: Tensor = self.kernel.fn(
            sent(self.q),
            PagedLatents(sent(self.pages.rows)),
            weights(self.weights),
            *map(sent, self.tables),
            sent(torch.nn.functional.pad(self.table, (0, columns))),
            sent(self.sequence),
            sent(self.positions),
            window=WINDOW,
            scale=SCALE,
            sinks_H=sent(self.sinks),
            choice=choice,
        )
        return out.cpu()


def case(kernel: Kernel, device: str) -> Case:
    width, index_width = FACTS.raw_width(DIM), FACTS.raw_width(INDEX_DIM)
    num_blocks = -(-LENGTH // BLOCK)
    table = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(0)).view(2, -1) + 1
    angles = randn(LENGTH + 1, FACTS.rope_dim // 2, seed=1).repeat(1, 2)
    positions = torch.tensor([0, 2, 3, 40, 61, 130, LENGTH - 2, LENGTH - 1])
    sequence = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1])
    num_rows = len(positions)
    return Case(
        PagedLatents(randn(1, 1 + 2 * num_blocks, BLOCK, DIM + width + index_width, seed=2)),
        table,
        EntryWeights(FACTS, randn(FACTS.rate, width // 2, seed=3), RowNorm(randn(DIM, seed=4), 1e-5)),
        EntryWeights(
            FACTS, randn(FACTS.rate, index_width // 2, seed=5), RowNorm(randn(INDEX_DIM, seed=6), 1e-5)
        ),
        (angles.cos(), angles.sin()),
        sequence,
        positions,
        randn(num_rows, HEADS, DIM, seed=7),
        randn(num_rows, INDEX_HEADS, INDEX_DIM, seed=8),
        randn(num_rows, INDEX_HEADS, seed=9),
        randn(HEADS, seed=10),
        kernel,
        device,
    )


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


def turned_row(x: Tensor, angle: Tensor, sign: float = 1.0) -> Tensor:
    """Return a vector whose last numbers turn pair by pair."""
    x = x.clone()
    first = len(x) - FACTS.rope_dim
    for pair in range(FACTS.rope_dim // 2):
        even, odd = x[first + 2 * pair].clone(), x[first + 2 * pair + 1].clone()
        cos, sin = torch.cos(angle[pair]), sign * torch.sin(angle[pair])
        x[first + 2 * pair] = even * cos - odd * sin
        x[first + 2 * pair + 1] = odd * cos + even * sin
    return x


def expected_row(of: Case, row: int, top_entries: int) -> Tensor:
    """Return attention of one row, computed term by term."""
    position = int(of.positions[row])
    angles = torch.atan2(of.tables[1], of.tables[0])[:, : FACTS.rope_dim // 2].double()
    blocks = of.table[of.sequence[row]]
    cached = of.pages.rows[0][blocks].flatten(0, 1)[: position + 1].double()
    width = FACTS.raw_width(DIM)

    def entry(idx: int, numbers: Tensor, weights: EntryWeights) -> Tensor:
        kv, gate = numbers.chunk(2, dim=1)
        half = kv.shape[1] // 2
        own = range(idx * FACTS.rate, (idx + 1) * FACTS.rate)
        terms = [(kv[p, half:], (gate[p] + weights.positions[p % FACTS.rate])[half:]) for p in own]
        if idx:
            before = range((idx - 1) * FACTS.rate, idx * FACTS.rate)
            terms += [(kv[p, :half], (gate[p] + weights.positions[p % FACTS.rate])[:half]) for p in before]
        shares = torch.stack([each for _, each in terms]).softmax(0)
        summed = (shares * torch.stack([each for each, _ in terms])).sum(0)
        normed = summed / (summed.square().mean() + weights.norm.eps).sqrt() * weights.norm.weight.double()
        return turned_row(normed, angles[idx * FACTS.rate])

    num_seen = (position + 1) // FACTS.rate
    index_q = [turned_row(each, angles[position]) for each in of.index_q[row].double()]
    scores = []
    for idx in range(num_seen):
        key = entry(idx, cached[:, DIM + width :], of.scored)
        of_heads = [
            max(float(q @ key), 0.0) * float(w) for q, w in zip(index_q, of.factors[row], strict=True)
        ]
        scores.append(math.fsum(of_heads))
    chosen = sorted(range(num_seen), key=lambda idx: (-scores[idx], idx))[:top_entries]
    keys = [entry(idx, cached[:, DIM : DIM + width], of.weights) for idx in chosen]
    keys += list(cached[max(0, position + 1 - WINDOW) :, :DIM])
    k = torch.stack(keys)
    outputs = []
    for q, sink in zip(of.q[row].double(), of.sinks.double(), strict=True):
        shares = torch.cat((k @ q * SCALE, sink.view(1))).softmax(0)[:-1]
        outputs.append(turned_row(shares @ k, angles[position], -1.0))
    return torch.stack(outputs)


@usable("compressed_attention", n=DIM, k=HEADS)
@pytest.mark.parametrize("top_entries", [1, 5, 40, 66])
def test_rows_attend_to_the_entries_with_the_largest_scores(
    top_entries: int, kernel: Kernel, device: str
) -> None:
    of = case(kernel, device)
    attended = of.attended(top_entries)
    for row in range(len(of.positions)):
        expected = expected_row(of, row, top_entries)
        torch.testing.assert_close(attended[row].double(), expected, rtol=0, atol=2e-5)
    assert not torch.equal(of.attended(None)[5:], of.attended(40)[5:])


@usable("compressed_attention", n=DIM, k=HEADS)
def test_a_choice_of_all_entries_has_the_bits_of_no_choice(kernel: Kernel, device: str) -> None:
    of = case(kernel, device)
    assert torch.equal(of.attended(LENGTH // FACTS.rate), of.attended(None))
    short = of.positions < 40 * FACTS.rate
    assert torch.equal(of.attended(40)[short], of.attended(None)[short])


@usable("compressed_attention", n=DIM, k=HEADS)
@pytest.mark.parametrize("most", [1, 3000, 20_000])
def test_turns_of_any_size_and_blocks_that_no_row_reads_change_no_bit(
    most: int, kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = case(kernel, device)
    whole = of.attended(9)
    monkeypatch.setattr(computed_entries, "MOST_RAW", most)
    monkeypatch.setattr(reference, "MOST_KEYS", most)
    monkeypatch.setattr(paged, "MOST_SUMMED", most)
    assert torch.equal(of.attended(9, columns=11), whole)


@usable("compressed_attention", n=DIM, k=HEADS)
def test_of_equal_scores_the_earliest_entries_are_chosen(kernel: Kernel, device: str) -> None:
    of = case(kernel, device)
    of.factors.zero_()
    attended = of.attended(9)
    for row in range(len(of.positions)):
        torch.testing.assert_close(attended[row].double(), expected_row(of, row, 9), rtol=0, atol=2e-5)
