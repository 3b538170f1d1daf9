"""The choice of blocks by an indexer, against one that goes query by query and head by head in Python."""

import math

import pytest
import torch
from torch import Tensor

from compress.models.block_choice import chosen_blocks, keys_of_blocks, rotate_first
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import Rope
from compress.models.rope import cos_sin, rotate

LENGTH = 43
WIDTH = 8
FACTS = {
    "heads": BlockIndexer(3, WIDTH, block_size=4, top_blocks=3),
    "two local": BlockIndexer(2, WIDTH, block_size=5, top_blocks=3, local_blocks=2),
    "all local": BlockIndexer(2, WIDTH, block_size=3, top_blocks=2, local_blocks=2),
    "pooled": BlockIndexer(4, WIDTH, block_size=4, top_blocks=3, pooled=True),
    "pooled, of one block": BlockIndexer(5, WIDTH, block_size=7, top_blocks=1, pooled=True),
}
each_kind = pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products_of(facts: BlockIndexer, *, ties: bool) -> Tensor:
    """Return products of queries at all positions; with `ties` they are few whole numbers."""
    num_keys = LENGTH // facts.block_size if facts.pooled else LENGTH
    products = randn(LENGTH, facts.num_heads, num_keys)
    return products.round() if ties else products


def best(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda idx: (-scores[idx], idx))[:count])


def expected_blocks(facts: BlockIndexer, products_NP: Tensor, position: int) -> list[set[int]]:
    size = facts.block_size
    if facts.pooled:
        num_whole = (position + 1) // size
        scores = [float(torch.relu(products_NP[:, idx]).sum()) for idx in range(num_whole)]
        return [best(scores, facts.top_blocks) | ({num_whole} if (position + 1) % size else set())]
    found = []
    own = position // size
    for products_P in products_NP.tolist():
        scores = [max(products_P[idx * size : position + 1][:size]) for idx in range(own + 1)]
        scores = [math.inf if idx > own - facts.local_blocks else each for idx, each in enumerate(scores)]
        found.append(best(scores, facts.top_blocks))
    return found


@each_kind
@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
def test_the_best_blocks_are_chosen_the_earliest_of_equal_ones(facts: BlockIndexer, ties: bool) -> None:
    products = products_of(facts, ties=ties)
    chosen = chosen_blocks(facts, products, torch.arange(LENGTH), LENGTH)
    for position in range(LENGTH):
        seen = range(position // facts.block_size + 1)
        found = [{idx for idx in seen if bool(row[idx])} for row in chosen[position]]
        assert found == expected_blocks(facts, products[position], position)


@each_kind
def test_a_choice_does_not_depend_on_later_positions(facts: BlockIndexer) -> None:
    products = products_of(facts, ties=True)
    chosen = chosen_blocks(facts, products, torch.arange(LENGTH), LENGTH)
    for position in range(facts.top_k, LENGTH, 5):
        length = position + 1
        num_keys = length // facts.block_size if facts.pooled else length
        alone = chosen_blocks(facts, products[position, :, :num_keys], torch.tensor(position), length)
        assert torch.equal(alone, chosen[position, :, : alone.shape[-1]])


@each_kind
def test_every_block_is_chosen_up_to_so_many_positions(facts: BlockIndexer) -> None:
    products = products_of(facts, ties=False)
    chosen = chosen_blocks(facts, products, torch.arange(LENGTH), LENGTH)
    every = chosen.repeat_interleave(facts.block_size, dim=-1)[..., :LENGTH]
    is_whole = [bool(every[idx, :, : idx + 1].all()) for idx in range(LENGTH)]
    assert is_whole == [idx < facts.top_k for idx in range(LENGTH)]


def test_keys_of_blocks_are_means_of_whole_blocks_alone() -> None:
    facts = FACTS["pooled"]
    index_keys = randn(2, LENGTH, WIDTH)
    starts: list[Tensor] = []

    def turned(means: Tensor, starts_J: Tensor) -> Tensor:
        starts.append(starts_J)
        return means * 2

    found = keys_of_blocks(facts, index_keys, turned)
    assert starts[0].tolist() == list(range(0, 40, 4))
    expected = 2 * index_keys[:, :40].unflatten(1, (10, 4)).mean(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for length in (4, 21):
        fewer = keys_of_blocks(facts, index_keys[1:, :length], turned)
        assert torch.equal(fewer[0], found[1, : length // 4])
    assert keys_of_blocks(FACTS["heads"], index_keys, turned) is index_keys


@pytest.mark.parametrize("index_dim", [12, 16, 20])
def test_the_first_dimensions_turn_as_a_head_of_so_many_does(index_dim: int) -> None:
    positions = torch.arange(9)
    x = randn(9, 3, index_dim)
    tables = cos_sin(Rope(500.0, rotary_dim=12), 16, positions, torch.float32)
    found = rotate_first(x, *tables, 12)
    alone = rotate(x[..., :12], *cos_sin(Rope(500.0, rotary_dim=12), 12, positions, torch.float32))
    assert torch.equal(found, torch.cat((alone, x[..., 12:]), dim=-1))
