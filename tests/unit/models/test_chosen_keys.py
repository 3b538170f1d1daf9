"""The choice of keys by scores: as many as are wanted among those that are seen, the largest scores first and
of equal ones the earlier position."""

import pytest
import torch
from torch import Tensor

from compress.models import chosen_keys as module
from compress.models.attention import causal_mask
from compress.models.chosen_keys import chosen_keys, index_scores, positions_of


def by_sorting(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """The definition, one query after the other."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, of_row in enumerate(scores):
        positions = [idx for idx in range(len(of_row)) if seen[row, idx]]
        best = sorted(positions, key=lambda idx: (-float(of_row[idx]), idx))[:top_k]
        chosen[row, best] = True
    return chosen


@pytest.mark.parametrize("num_values", [1, 2, 5, 1000])
@pytest.mark.parametrize("top_k", [1, 4, 9])
def test_the_best_are_chosen_and_of_equal_ones_the_earliest(num_values: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    scores = torch.randint(num_values, (23, 23), generator=generator).float() - num_values // 2
    seen = causal_mask(23, 23, None, torch.device("cpu"))
    found = chosen_keys(scores, seen, top_k)
    assert torch.equal(found, by_sorting(scores, seen, top_k))
    assert torch.equal(found.sum(1), torch.arange(1, 24).clamp(max=top_k))


def test_queries_in_parts_have_the_choices_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randint(4, (2, 9, 30), generator=torch.Generator().manual_seed(1)).to(torch.float32)
    seen = causal_mask(9, 30, None, torch.device("cpu"))
    whole = chosen_keys(scores, seen, 7)
    monkeypatch.setattr(module, "MOST_CHOSEN_FROM", 2 * 2 * 30)
    assert torch.equal(chosen_keys(scores, seen, 7), whole)


def test_positions_are_those_of_the_choice_in_order() -> None:
    chosen = torch.tensor([[True, False, True, True, False], [False, True, False, False, False]])
    assert positions_of(chosen, 3).tolist() == [[0, 2, 3], [1, 0, 0]]


def test_scores_are_the_weighted_sum_of_what_heads_have_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 7, 3, 5), (2, 11, 5), (2, 7, 3))
    )
    of_heads = torch.einsum("bshi,bpi->bshp", q, k).clamp(min=0)
    expected = torch.einsum("bsh,bshp->bsp", weights, of_heads)
    whole = index_scores(q, k, weights)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(module, "MOST_SCORES", 2 * 2 * 3 * 11)
    torch.testing.assert_close(index_scores(q, k, weights), whole)
