"""Kernels by which indexers choose keys: every one that runs here against the law, and the choice of rows in
company. In triton's interpreter those are the GPU's kernels, too, on a GPU the same.

The interpreter truncates where bfloat16 rounds: float16 and float32 stand in.
"""

import pytest
import torch
from torch import Tensor

from compress.kernels.block_choice import paged as of_blocks
from compress.kernels.index_choice import largest as of_scores
from compress.kernels.index_choice import paged as of_positions
from compress.kernels.operands import index_keys
from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel
from compress.models.block_choice import chosen_blocks, keys_of_blocks, num_attended, rotate_first
from compress.models.chosen_keys import chosen_keys, positions_of
from compress.models.indexer import BlockIndexer
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import DEVICES, usable

TILE = of_scores.TILE
DTYPES = {"F32": torch.float32, "F16": torch.float16}
ENDS = (1, 37, 38, 90, 600, 129, 257)
"""Positions that rows see."""
BLOCK_SIZE = 8
TOP_K = 37

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or triton's interpreter"
)
in_parts = pytest.mark.parametrize("whole", [True, False], ids=["whole", "in parts"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
each_indexer = pytest.mark.parametrize(
    "facts",
    [
        BlockIndexer(1, 8, block_size=4, top_blocks=5),
        BlockIndexer(3, 34, block_size=7, top_blocks=4, local_blocks=2),
        BlockIndexer(4, 32, block_size=160, top_blocks=1),
        BlockIndexer(2, 24, block_size=16, top_blocks=20),
        BlockIndexer(5, 32, block_size=4, top_blocks=5, pooled=True),
        BlockIndexer(8, 20, block_size=6, top_blocks=3, pooled=True),
    ],
    ids=lambda each: f"{each.num_heads}x{each.head_dim} {each.block_size} {'pooled' * each.pooled}",
)


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


@pytest.fixture
def parts(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels choose for few rows at once, by few programs and from several tiles, where they are
    not to do all at once."""
    if not whole:
        monkeypatch.setattr(of_scores, "TILE", 256)
        monkeypatch.setattr(index_keys, "MOST_SCORES", 1500)
        monkeypatch.setattr(index_keys, "PROGRAMS", 2)


def randn(*size: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def sequences(width: int, dtype: torch.dtype, device: str) -> tuple[PagedLatents, Tensor, Tensor]:
    """Return pages with positions of sequences in blocks of no order, the blocks of each, and the ends. What
    no row sees is infinite."""
    num_blocks = -(-max(ENDS) // BLOCK_SIZE)
    order = torch.randperm(len(ENDS) * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(ENDS), -1).to(device, torch.int32)
    rows = randn(1, 1 + len(order), BLOCK_SIZE, width, seed=3, device=device, dtype=dtype)
    ends = torch.tensor([(end, 0) for end in ENDS], dtype=torch.int32, device=device)[:, 0]  # not contiguous
    unseen = torch.arange(num_blocks * BLOCK_SIZE, device=device).view(num_blocks, -1) >= ends.view(-1, 1, 1)
    rows[0, table.long()] = rows[0, table.long()].masked_fill(unseen.unsqueeze(-1), torch.inf)
    return PagedLatents(rows), table, ends


def keys_of(pages: PagedLatents, table: Tensor, row: int) -> Tensor:
    """Return the keys that a row sees, float64."""
    return pages.rows[0, table[row].long()].flatten(0, 1)[: ENDS[row]].to(torch.float64)


def slots_of_row(table: Tensor, row: int) -> Tensor:
    """Return the slots of the positions of a sequence, int64."""
    places = torch.arange(BLOCK_SIZE, device=table.device)
    return (table[row].long().unsqueeze(1) * BLOCK_SIZE + places).flatten()


@needs_triton
@pytest.mark.parametrize("tile", [TILE, 1024], ids=["one tile", "tiles"])
@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("kind", ["random", "few values", "zeros of both signs", "infinite"])
def test_the_largest_scores_are_found_and_the_first_of_equal_ones(
    kind: str, count: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_scores, "TILE", tile)
    device = DEVICES[-1]
    scores = randn(2 * len(ENDS), 5003, seed=5, device=device)
    if kind == "few values":
        scores = (2 * scores).round()
    elif kind == "zeros of both signs":
        scores = torch.where(scores < 1.5, scores.sign() * 0.0, scores)
    elif kind == "infinite":
        scores = torch.where(scores > 1, torch.inf, scores)
    ends = torch.tensor([1, 5, 6, 299, 1024, 2500, 5003], device=device)
    seen = torch.arange(5003, device=device) < ends.repeat_interleave(2).unsqueeze(1)
    expected = positions_of(chosen_keys(scores, seen, count), count)
    assert torch.equal(of_scores.largest(scores.masked_fill(~seen, torch.nan), ends, count), expected)


@usable("index_choice", n=32, k=4)
@in_parts
@pytest.mark.usefixtures("parts")
@each_dtype
@pytest.mark.parametrize(("num_heads", "width"), [(1, 8), (5, 10), (16, 32)])
def test_an_indexer_chooses_the_positions_of_the_largest_scores(
    kernel: Kernel, device: str, num_heads: int, width: int, dtype: torch.dtype
) -> None:
    pages, table, ends = sequences(width, dtype, device)
    if kernel.name == "reference":  # whose products of what is not seen are left out later
        pages.rows.nan_to_num_(posinf=1.0)
    q = randn(len(ENDS), num_heads, width, seed=6, device=device, dtype=dtype)
    weights = randn(len(ENDS), num_heads, seed=7, device=device)

    def chosen(rows: list[int], num_blocks: int) -> Tensor:
        found: Tensor = kernel.fn(
            q[rows], weights[rows], pages, table[rows, :num_blocks], ends[rows], top_k=TOP_K
        )
        return found

    whole = chosen(list(range(len(ENDS))), table.shape[1])
    for row, end in enumerate(ENDS):
        slots = slots_of_row(table, row)
        of_heads = (q[row].to(torch.float64) @ keys_of(pages, table, row).mT).clamp(min=0)
        scores = weights[row].to(torch.float64) @ of_heads
        best = scores.sort(descending=True, stable=True).indices[:TOP_K]
        assert whole[row, : len(best)].tolist() == slots[best.sort().values].tolist()
        assert (whole[row, len(best) :] == slots[0]).all()
        narrow = max(-(-end // BLOCK_SIZE), TOP_K // BLOCK_SIZE + 1)
        assert torch.equal(chosen([row], narrow), whole[row : row + 1])
    assert torch.equal(chosen([6, 0, 3], table.shape[1]), whole[[6, 0, 3]])


@needs_triton
@pytest.mark.parametrize("tile", [TILE, 256], ids=["one tile", "tiles"])
@pytest.mark.parametrize("and_last", [True, False])
def test_blocks_are_chosen_and_what_follows_the_last_whole_one(
    and_last: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_scores, "TILE", tile)
    device = DEVICES[-1]
    scores = randn(8, 901, seed=5, device=device)
    ends = torch.tensor([2, 120, 1500, 2699], device=device)
    units = ends // 3 if and_last else (ends + 2) // 3
    seen = torch.arange(901, device=device) < units.repeat_interleave(2).unsqueeze(1)
    chosen = chosen_keys(scores, seen, 40)
    if and_last:
        chosen = chosen.scatter(1, units.repeat_interleave(2).unsqueeze(1), value=True)
    expected = positions_of(chosen, 40 + and_last)
    found = of_scores.largest(scores.masked_fill(~seen, torch.nan), ends, 40, size=3, and_last=and_last)
    assert torch.equal(found, expected)


@needs_triton
@each_dtype
def test_scores_of_positions_have_their_bits_in_any_company(dtype: torch.dtype) -> None:
    device = DEVICES[-1]
    pages, table, ends = sequences(32, dtype, device)
    q = randn(len(ENDS), 16, 32, seed=6, device=device, dtype=dtype)
    weights = randn(len(ENDS), 16, seed=7, device=device)
    whole = of_positions.index_scores(q, weights, pages, table, ends)
    for row, end in enumerate(ENDS):
        blocks = table[row : row + 1, : -(-end // BLOCK_SIZE)]
        own = slice(row, row + 1)
        alone = of_positions.index_scores(q[own], weights[own], pages, blocks, ends[own])
        assert torch.equal(alone[0, :end], whole[row, :end])
        of_heads = (q[row].to(torch.float64) @ keys_of(pages, table, row).mT).clamp(min=0)
        scores = weights[row].to(torch.float64) @ of_heads
        sizes = q[row].abs().to(torch.float64) @ keys_of(pages, table, row).abs().mT
        sizes = weights[row].abs().to(torch.float64) @ sizes
        # sums of 32 products, and of 16 heads, are rounded as often
        assert ((whole[row, :end] - scores).abs() <= 2**-23 * (32 + 16 + 4) * sizes).all()


def block_keys(facts: BlockIndexer, dtype: torch.dtype, device: str) -> BlockKeys:
    angles = randn(max(ENDS), 8, seed=4, device=device)
    norm = RowNorm(randn(facts.head_dim, seed=5, device=device, dtype=dtype), 1e-6)
    return BlockKeys(facts, norm, 8, angles.cos().to(dtype), angles.sin().to(dtype))


def law_of_blocks(keys: BlockKeys, q: Tensor, own: Tensor, end: int) -> Tensor:
    """Return the positions that one row sees of its blocks, by heads [N or 1, W]."""
    facts = keys.facts

    def turned(means: Tensor, starts: Tensor) -> Tensor:
        normed = rms_norm(means, keys.norm.weight, keys.norm.eps).unsqueeze(-2)
        return rotate_first(normed, keys.cos_LC[starts], keys.sin_LC[starts], keys.rotary_dim).squeeze(-2)

    products = q.to(torch.float64) @ keys_of_blocks(facts, own.to(q.dtype), turned).to(torch.float64).mT
    chosen = chosen_blocks(facts, products, torch.tensor(end - 1, device=q.device), end)
    if facts.pooled and end % facts.block_size == 0:  # the last block has no position yet
        chosen = chosen[:, : end // facts.block_size]
    place = torch.arange(end, device=q.device) // facts.block_size
    return torch.stack([torch.arange(end, device=q.device)[each[place]] for each in chosen])


@usable("block_choice", n=32, k=4)
@in_parts
@pytest.mark.usefixtures("parts")
@each_dtype
@each_indexer
def test_an_indexer_chooses_blocks(
    kernel: Kernel, device: str, facts: BlockIndexer, dtype: torch.dtype
) -> None:
    pages, table, ends = sequences(facts.head_dim, dtype, device)
    if kernel.name == "reference":
        pages.rows.nan_to_num_(posinf=1.0)
    keys = block_keys(facts, dtype, device)
    q = randn(len(ENDS), facts.num_heads, facts.head_dim, seed=6, device=device, dtype=dtype)
    counts = num_attended(facts, ends - 1).tolist()

    def chosen(rows: list[int], num_blocks: int) -> list[Tensor]:
        found = kernel.fn(q[rows], keys, pages, table[rows, :num_blocks], ends[rows])
        assert found.min() >= 0
        assert found.max() < pages.rows[0, ..., 0].numel()
        return [heads[:, : counts[row]] for row, heads in zip(rows, found, strict=True)]

    whole = chosen(list(range(len(ENDS))), table.shape[1])
    for row, end in enumerate(ENDS):
        expected = slots_of_row(table, row)[law_of_blocks(keys, q[row], keys_of(pages, table, row), end)]
        assert torch.equal(whole[row], expected)
        assert torch.equal(chosen([row], -(-end // BLOCK_SIZE))[0], expected)
    for row, found in zip([6, 0, 3], chosen([6, 0, 3], table.shape[1]), strict=True):
        assert torch.equal(found, whole[row])


@needs_triton
@each_dtype
@each_indexer
def test_scores_of_blocks_have_their_bits_in_any_company(facts: BlockIndexer, dtype: torch.dtype) -> None:
    device = DEVICES[-1]
    pages, table, ends = sequences(facts.head_dim, dtype, device)
    keys = block_keys(facts, dtype, device)
    q = randn(len(ENDS), facts.num_heads, facts.head_dim, seed=6, device=device, dtype=dtype)
    whole = of_blocks.block_scores(q, keys, pages, table, ends)
    for row, end in enumerate(ENDS):
        own = slice(row, row + 1)
        alone = of_blocks.block_scores(q[own], keys, pages, table[own, : -(-end // BLOCK_SIZE)], ends[own])
        seen = end // facts.block_size if facts.pooled else -(-end // facts.block_size)
        assert torch.equal(alone[0, :, :seen], whole[row, :, :seen])
