"""The choice of keys by the scores of an indexer (arXiv 2512.02556).

    s_tp = sum_h w_th relu(q_th k_p)

A query attends to the `top_k` keys with the largest scores among those that it sees; of equal scores the
earlier position comes first, so that a choice depends on the scores alone.

Shapes: B batch, S queries, P positions, H heads of the indexer, I numbers of a key, K keys chosen.
"""

import math

import torch
from torch import Tensor

MOST_SCORES = 1 << 26
"""Scores of single heads that are computed at once: 256 MiB."""
MOST_CHOSEN_FROM = 1 << 23
"""Scores of keys of which some are chosen at once: some 23 bytes each, 184 MiB."""


def index_scores(q_BSHI: Tensor, k_BPI: Tensor, weights_BSH: Tensor) -> Tensor:
    """Return scores, float32 [B, S, P], of queries and of keys that all heads share."""
    num_batches, _, num_heads, _ = q_BSHI.shape
    at_once = max(1, MOST_SCORES // (num_batches * num_heads * k_BPI.shape[1]))
    k_B1IP = k_BPI.to(torch.float32).mT.unsqueeze(1)
    parts = []
    for q, weights in zip(q_BSHI.split(at_once, 1), weights_BSH.split(at_once, 1), strict=True):
        of_heads = torch.relu(torch.matmul(q.to(torch.float32), k_B1IP))
        parts.append(torch.matmul(weights.to(torch.float32).unsqueeze(-2), of_heads).squeeze(-2))
    return torch.cat(parts, dim=1)


def chosen_keys(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """Return which keys queries attend to, bool [..., S, P], by scores [..., S, P] of more than `top_k`
    positions; `seen` is True where a query sees a key."""
    at_once = max(1, MOST_CHOSEN_FROM * scores.shape[-2] // max(1, scores.numel()))
    parts = [
        _chosen_keys(*each, top_k)
        for each in zip(scores.split(at_once, -2), seen.expand_as(scores).split(at_once, -2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _chosen_keys(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    scores = scores.masked_fill(~seen, -math.inf)
    least = scores.topk(top_k, dim=-1).values[..., -1:]
    above = scores > least
    equal = scores == least
    missing = top_k - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= missing))) & seen


def positions_of(chosen_TP: Tensor, top_k: int) -> Tensor:
    """Return the chosen positions of each query in rising order, int64 [T, K], and zeros after the last of
    them."""
    places_TP = torch.where(chosen_TP, chosen_TP.cumsum(dim=-1) - 1, top_k)
    positions_TP = torch.arange(chosen_TP.shape[1], device=chosen_TP.device).expand_as(places_TP)
    found = positions_TP.new_zeros(len(chosen_TP), top_k + 1).scatter_(1, places_TP, positions_TP)
    return found[:, :top_k]
