"""Logits of the tokens in chosen clusters: those of a row depend on the row alone."""

import pytest
import torch
from torch import Tensor

from compress.models.assistant import OrderedEmbeddings, clusters
from compress.runtime import ordered_logits as served
from compress.runtime.ordered_logits import ordered_logits
from tests.support.slow import slow

NUM_ROWS = 70


def operands(
    num_clusters: int, num_tokens: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = num_clusters * num_tokens
    hidden_RD = torch.randn(NUM_ROWS, size, generator=generator).to(dtype)
    scores_RC = torch.randn(NUM_ROWS, num_clusters, generator=generator)
    head_VD = torch.randn(vocab_size, size, generator=generator).to(dtype)
    order = torch.randperm(vocab_size, generator=generator)
    return hidden_RD, scores_RC, head_VD, clusters(order, OrderedEmbeddings(num_clusters, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_clusters", "num_tokens", "size", "top_k"),
    [(12, 8, 32, 3), (61, 1, 32, 20), (7, 5, 20, 1), (5, 13, 48, 5), slow(2048, 128, 256, 32)],
)
def test_a_row_has_the_same_bits_alone_and_in_company(
    num_clusters: int, num_tokens: int, size: int, top_k: int, dtype: torch.dtype
) -> None:
    (hidden_RD, scores_RC, head_VD, tokens_CN) = operands(num_clusters, num_tokens, size, dtype)
    together_RV = ordered_logits(hidden_RD, scores_RC, head_VD, tokens_CN, top_k)
    assert together_RV.dtype == torch.float32
    assert together_RV.isfinite().sum(-1).tolist() == [top_k * num_tokens] * NUM_ROWS
    for first, last in ((0, 1), (1, 2), (9, 12), (40, 65), (NUM_ROWS - 1, NUM_ROWS)):
        rows = slice(first, last)
        found_RV = ordered_logits(hidden_RD[rows], scores_RC[rows], head_VD, tokens_CN, top_k)
        assert torch.equal(found_RV, together_RV[rows])


def test_rows_that_are_gathered_in_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden_RD, scores_RC, head_VD, tokens_CN) = operands(12, 8, 32, torch.float32)
    whole_RV = ordered_logits(hidden_RD, scores_RC, head_VD, tokens_CN, 3)
    for at_once in (1, 4):
        monkeypatch.setattr(served, "MOST_GATHERED", at_once * 3 * 8 * 32)
        assert torch.equal(ordered_logits(hidden_RD, scores_RC, head_VD, tokens_CN, 3), whole_RV)


def test_of_clusters_with_equal_scores_the_earlier_ones_are_chosen() -> None:
    (hidden_RD, _, head_VD, tokens_CN) = operands(64, 2, 16, torch.float32)
    scores_RC = torch.zeros(NUM_ROWS, 64)
    scores_RC[:, 50] = 1.0
    found_RV = ordered_logits(hidden_RD, scores_RC, head_VD, tokens_CN, 4)
    chosen = sorted(tokens_CN[[0, 1, 2, 50]].flatten().tolist())
    assert all(row.isfinite().nonzero().flatten().tolist() == chosen for row in found_RV)
