"""A mix of token sets: windows of several, in the proportion of weights.

Window i is of the set that has the fewest windows so far for its weight, counted half a window ahead (the
method of Sainte-Laguë). So the first n windows have the proportions to within a window for every n, and a
larger sample begins with the smaller one if those of the sets do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compress.data.tokens import TokenSet


def window_order(weights: Sequence[float], num_windows: int) -> list[int]:
    """Return for each window the index of the set that it is of; of equal claims the earlier set wins."""
    taken = [0] * len(weights)
    order = []
    for _ in range(num_windows):
        idx = min(range(len(weights)), key=lambda each: (2 * taken[each] + 1) / weights[each])
        taken[idx] += 1
        order.append(idx)
    return order


def mixed(sets: Mapping[int, TokenSet], order: Sequence[int], facts: Mapping[str, Any]) -> TokenSet:
    """Return the windows of `sets` in that order; each set is used up. If only some sets have tokens that do
    not count, all tokens of the others do."""
    whole_NS = torch.cat([each.tokens_NS for each in sets.values()])
    counted_NS = None
    if any(each.counted_NS is not None for each in sets.values()):
        counted_NS = torch.cat(
            [
                torch.ones_like(each.tokens_NS, dtype=torch.bool)
                if each.counted_NS is None
                else each.counted_NS
                for each in sets.values()
            ]
        )
    begins = dict.fromkeys(sets, 0)
    row = 0
    for idx, each in sets.items():
        begins[idx] = row
        row += len(each.tokens_NS)
    rows = []
    for idx in order:
        rows.append(begins[idx])
        begins[idx] += 1
    cards = [{**each.source, "num_samples": len(each.tokens_NS)} for each in sets.values()]
    return TokenSet(
        whole_NS[rows],
        sum(each.num_bytes for each in sets.values()),
        sum(each.num_scored_bytes for each in sets.values()),
        {**facts, "cards": cards},
        None if counted_NS is None else counted_NS[rows],
    )
