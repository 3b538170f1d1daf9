"""Perplexity by position in the context: an error that grows with the context, of a cache or of rotations,
shows in the last buckets first.

Positions 1..S-1 of N windows are cut into buckets of equal size. The ratio of a bucket is paired by
window, and its interval is over windows (`stats.py`).

Shapes: N windows of S tokens, T = S - 1 scored positions.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import UsageError
from compress.validate.accuracy import Logits, score_window
from compress.validate.stats import Estimate, mean_estimate


@dataclass(frozen=True)
class PositionRow:
    """Positions `start` to `stop` - 1 of the context."""

    start: int
    stop: int
    ppl_source: float
    ppl_candidate: float
    ppl_ratio: Estimate
    kl_mean: Estimate

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def by_position(
    source: Logits, candidate: Logits, tokens_NS: Tensor, *, num_buckets: int
) -> list[PositionRow]:
    """Return one row a bucket of positions.

    Raises:
        UsageError: there are fewer than two windows, or fewer positions than buckets.
    """
    num_windows, window_size = tokens_NS.shape
    if num_windows < 2 or window_size - 1 < num_buckets:
        raise UsageError(
            f"perplexity by position needs two windows at least and a position a bucket: {num_windows} "
            "windows of "
            f"{window_size} tokens were given for {num_buckets} buckets."
        )
    scores = []
    with torch.inference_mode():
        for window_1S in tokens_NS.split(1):
            scores.append(score_window(source(window_1S)[0], candidate(window_1S)[0], window_1S[0]))
    nll_source_NT, nll_candidate_NT, kl_NT = (
        torch.stack([getattr(each, name) for each in scores]).double().numpy()
        for name in ("nll_source", "nll_candidate", "kl")
    )
    edges = np.linspace(0, window_size - 1, num_buckets + 1).round().astype(int)
    rows = []
    for start, stop in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        source_N, candidate_N, kl_N = (
            each[:, start:stop].mean(axis=1) for each in (nll_source_NT, nll_candidate_NT, kl_NT)
        )
        change = mean_estimate(candidate_N - source_N)
        kl = mean_estimate(kl_N)
        rows.append(
            PositionRow(
                start=start + 1,
                stop=stop + 1,
                ppl_source=math.exp(source_N.mean()),
                ppl_candidate=math.exp(candidate_N.mean()),
                ppl_ratio=Estimate(*(math.exp(each) for each in (change.value, change.lower, change.upper))),
                kl_mean=Estimate(kl.value, max(kl.lower, 0.0), kl.upper),
            )
        )
    return rows


def growth(rows: Sequence[PositionRow]) -> float:
    """Return how much larger the mean KL of the last bucket is than that of the first; 1 where both are 0."""
    first = rows[0].kl_mean.value
    last = rows[-1].kl_mean.value
    return 1.0 if first == last else last / max(first, 1e-12)
