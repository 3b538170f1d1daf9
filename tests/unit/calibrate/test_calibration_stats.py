"""Statistics: what they sum, and that the bits do not depend on how the work was split."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress.calibrate.layer_run import PIECE_TOKENS, LayerRun, piece_tokens_of, shards_of_rank
from compress.calibrate.stats import AbsMax, AbsMean, MergeTree, Range, SecondMoment
from compress.context import NUM_SHARDS
from tests.support.tiny_decoder import tiny_arch
from tests.unit.calibrate.test_experts import MOE

Kind = type[SecondMoment] | type[AbsMean]
KINDS: list[Kind] = [SecondMoment, AbsMean]
BOTH = pytest.mark.parametrize("kind", KINDS)


def samples(num: int = 23, size: int = 12) -> list[Tensor]:
    """Magnitudes far apart, so that another order of summation shows in the bits."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(7, size, generator=generator) * 10.0 ** torch.randn(7, size, generator=generator)
        for _ in range(num)
    ]


def shards(kind: Kind, xs: list[Tensor]) -> list[SecondMoment | AbsMean]:
    stats: list[SecondMoment | AbsMean] = []
    for shard in shards_of_rank(len(xs)).values():
        stat = kind()
        for x_TD in xs[shard.start : shard.stop]:
            stat.update(x_TD)
        stats.append(stat)
    return stats


def merged(stats: list[SecondMoment | AbsMean]) -> SecondMoment | AbsMean:
    tree: MergeTree[SecondMoment | AbsMean] = MergeTree()
    for idx, stat in enumerate(stats):
        tree.push(idx, stat)
    return tree.root()


@BOTH
def test_the_mean_is_that_of_all_tokens(kind: Kind) -> None:
    xs = samples()
    x_TD = torch.cat(xs).double()
    expected = x_TD.t() @ x_TD / len(x_TD) if kind is SecondMoment else x_TD.abs().mean(0)
    total = merged(shards(kind, xs))
    assert total.num_tokens == len(x_TD)
    assert total.mean().dtype == torch.float32
    assert torch.allclose(total.mean().double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@BOTH
@given(cuts=st.sets(st.integers(0, NUM_SHARDS)))
def test_trees_over_any_runs_of_shards_join_to_the_same_bits(kind: Kind, cuts: set[int]) -> None:
    xs = samples()
    whole = merged(shards(kind, xs)).mean()
    stats = shards(kind, xs)
    joined = MergeTree[SecondMoment | AbsMean]()
    edges = [0, *sorted(cuts), NUM_SHARDS]
    for begin, end in zip(edges, edges[1:], strict=False):
        part = MergeTree[SecondMoment | AbsMean]()
        for idx in range(begin, end):
            part.push(idx, stats[idx])
        for node in part.nodes():
            joined.join(node)
    assert torch.equal(joined.root().mean(), whole)


@BOTH
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_that_own_whole_shards_give_the_same_bits(kind: Kind, num_ranks: int) -> None:
    xs = samples()
    whole = merged(shards(kind, xs)).mean()
    per_rank = NUM_SHARDS // num_ranks
    stats = shards(kind, xs)
    ranks = [merged(stats[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    assert torch.equal(merged(ranks).mean(), whole)


@BOTH
def test_the_order_of_summation_is_one_that_matters(kind: Kind) -> None:
    """Otherwise the test above could not fail: one long sum has other bits than the tree."""
    xs = samples()
    straight = kind()
    for x_TD in xs:
        straight.update(x_TD)
    assert not torch.equal(straight.mean(), merged(shards(kind, xs)).mean())


@given(st.integers(1, 40))
def test_the_tree_pairs_neighbours_and_keeps_the_order(num: int) -> None:
    """Strings for statistics let the association be read; for a power of two it is the balanced tree."""

    class Name:
        def __init__(self, text: str) -> None:
            self.text = text

        def update(self, x_TD: Tensor) -> None: ...

        def merge(self, other: "Name") -> None:
            self.text = f"({self.text} {other.text})"

        def compact(self) -> None: ...

        def rescale_(self, scale_D: Tensor) -> None: ...

    tree: MergeTree[Name] = MergeTree()
    for idx in range(num):
        tree.push(idx, Name(str(idx)))
        assert len(tree._pending) == (idx + 1).bit_count()
    text = tree.root().text
    assert text.replace("(", "").replace(")", "").split() == [str(idx) for idx in range(num)]
    level = [str(idx) for idx in range(num)]
    if num.bit_count() == 1:
        while len(level) > 1:
            level = [f"({one} {two})" for one, two in zip(level[::2], level[1::2], strict=True)]
        assert text == level[0]


@BOTH
def test_rescaling_is_the_statistic_of_rescaled_inputs(kind: Kind) -> None:
    xs = samples()
    scale_D = torch.exp(torch.randn(12, generator=torch.Generator().manual_seed(1)))
    rescaled = merged(shards(kind, xs))
    direct = merged(shards(kind, [x_TD / scale_D for x_TD in xs]))
    rescaled.rescale_(scale_D)
    assert torch.allclose(
        rescaled.mean(), direct.mean(), rtol=1e-4, atol=1e-6 * float(direct.mean().abs().max())
    )


@BOTH
def test_merging_nothing_changes_nothing(kind: Kind) -> None:
    full = merged(shards(kind, samples()))
    empty = kind()
    before = full.mean()
    full.merge(empty)  # type: ignore[arg-type]
    assert torch.equal(full.mean(), before)
    empty.merge(full)  # type: ignore[arg-type]
    assert torch.equal(empty.mean(), before)


def test_half_precision_inputs_are_summed_in_float32() -> None:
    x_TD = torch.full((4096, 3), 1.0, dtype=torch.bfloat16)
    for kind, expected in ((SecondMoment, torch.ones(3, 3)), (AbsMean, torch.ones(3))):
        stat = kind()
        for _ in range(3):
            stat.update(x_TD)
        assert torch.equal(stat.mean(), expected)  # bf16 would stop counting at 256


@given(st.integers(0, 300))
def test_shards_cut_the_samples_into_even_runs(num_samples: int) -> None:
    shards = shards_of_rank(num_samples)
    assert list(shards) == list(range(min(num_samples, NUM_SHARDS)))
    assert [idx for shard in shards.values() for idx in shard] == list(range(num_samples))
    sizes = [len(shard) for shard in shards.values()]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_the_range_of_inputs_is_that_of_all_tokens_and_follows_a_folded_scale(num_ranks: int) -> None:
    xs = samples()
    scale_D = torch.rand(12, generator=torch.Generator().manual_seed(3)) + 0.1
    tree: MergeTree[AbsMax] = MergeTree()
    for rank in range(num_ranks):
        stat = AbsMax()
        for x_TD in xs[rank::num_ranks]:
            stat.update(x_TD)
        tree.push(rank, stat)
    total = tree.root()
    assert float(total.max()) == max(float(x_TD.abs().max()) for x_TD in xs)
    total.rescale_(scale_D)
    assert float(total.max()) == max(float((x_TD / scale_D).abs().max()) for x_TD in xs)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_both_ends_of_inputs_cover_all_tokens_and_zero_and_follow_a_folded_scale(num_ranks: int) -> None:
    xs = [x_TD + 0.5 for x_TD in samples()]
    scale_D = torch.rand(12, generator=torch.Generator().manual_seed(3)) + 0.1
    tree: MergeTree[Range] = MergeTree()
    for rank in range(num_ranks):
        stat = Range()
        for x_TD in xs[rank::num_ranks]:
            stat.update(x_TD)
        tree.push(rank, stat)
    total = tree.root()
    all_TD = torch.cat(xs)
    assert [float(each) for each in total.whole()] == [float(all_TD.min()), float(all_TD.max())]
    total.rescale_(scale_D)
    assert [float(each) for each in total.whole()] == [
        float((all_TD / scale_D).min()),
        float((all_TD / scale_D).max()),
    ]
    positive = Range()
    positive.update(torch.rand(3, 4) + 1)
    assert positive.whole()[0] == 0


@pytest.mark.parametrize(
    ("num_samples", "seq_len", "ranks"), [(128, 512, 1), (11, 13, 3), (37, 700, 2), (5, 4096, 1), (2, 64, 3)]
)
def test_pieces_are_whole_samples_of_one_shard_and_the_same_for_any_number_of_ranks(
    num_samples: int, seq_len: int, ranks: int
) -> None:
    alone = LayerRun.on_one_rank(torch.zeros(num_samples, seq_len, 1))
    found = []
    for rank in range(ranks):
        shards = shards_of_rank(num_samples, rank=rank, num_ranks=ranks)
        own = replace(alone, shards=shards)
        start = own.sample_range.start
        for shard_idx, pieces in own.pieces().items():
            covered = [idx + start for piece in pieces for idx in range(piece.start, piece.stop)]
            assert covered == list(alone.shards[shard_idx])
            assert all((piece.stop - piece.start) * seq_len <= max(PIECE_TOKENS, seq_len) for piece in pieces)
            assert all(
                (piece.stop - piece.start + 1) * seq_len > PIECE_TOKENS for piece in pieces[:-1]
            )  # no smaller than they must be
            found += [(piece.start + start, piece.stop + start) for piece in pieces]
    assert found == [(piece.start, piece.stop) for pieces in alone.pieces().values() for piece in pieces]


def test_a_piece_of_a_mixture_holds_as_many_tokens_for_an_expert_as_another_for_an_ffn() -> None:
    assert piece_tokens_of(tiny_arch()) == PIECE_TOKENS
    for top_k, longer in ((8, 1), (3, 2), (2, 4), (1, 8)):
        assert piece_tokens_of(tiny_arch(MOE, num_experts_per_tok=top_k)) == longer * PIECE_TOKENS
    assert piece_tokens_of(tiny_arch(MOE, num_experts=64, num_experts_per_tok=2)) == 16 * PIECE_TOKENS


def test_a_moment_is_symmetric_however_its_halves_met() -> None:
    """A CPU sums only the blocks up to the diagonal; parked or not, merged or not, the rest follows."""
    x_TD = torch.randn(40, 600, generator=torch.Generator().manual_seed(0))
    parts = [SecondMoment() for _ in range(4)]
    for part, rows in zip(parts, x_TD.split(10), strict=True):
        part.update(rows)
    parts[1].compact()
    parts[2].compact()
    parts[0].merge(parts[1])
    parts[2].merge(parts[3])
    parts[0].merge(parts[2])
    parts[0].compact()
    whole = parts[0].mean()
    assert torch.equal(whole, whole.t())
    assert torch.allclose(whole, x_TD.t() @ x_TD / 40, atol=1e-4)
