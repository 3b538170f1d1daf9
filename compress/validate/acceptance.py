"""Acceptance: how many tokens come out of a step of speculative decoding, and which proposals are kept.

    acceptance length   tokens that come out of a step, the model's own included: k + 1 at most. Tokens
                        over steps, without a request's last steps, which have no room for k; the interval
                        is over prompts
    rate of position j  share of these steps that kept the j-th proposal; the rates add up to the acceptance
                        length - 1
    repeated 4-grams    share of a plain continuation's 4-grams that it had before: a repetitive model is
                        easy to guess

All of it is read from when tokens arrive: those of one step arrive at the same moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from compress.runtime.request import Finished
from compress.validate.stats import Estimate, ratio_estimate

ALL = "all"
"""The category of all prompts."""


@dataclass(frozen=True)
class AcceptanceRow:
    """One proposer, temperature and category of prompts."""

    proposer: str
    temperature: float
    category: str
    num_prompts: int
    num_steps: int
    acceptance_length: Estimate
    acceptance_rates: tuple[float, ...]
    repeated_4grams: float


def acceptance_rows(
    name: str,
    temperature: float,
    finished: Sequence[Finished],
    plain: Sequence[Finished],
    *,
    categories: Sequence[str],
    k: int,
) -> list[AcceptanceRow]:
    """Return the row of all prompts, then that of each category if there are several.

    Args:
        finished: the continuations, `plain` those of plain decoding; those of the prompts first, in their
        order. What follows has prompts
            that were there before, and does not count.
        categories: of each prompt.
    """
    several = len(set(categories)) > 1
    rows = []
    for category in (ALL, *(dict.fromkeys(categories) if several else ())):
        chosen = [idx for idx, own in enumerate(categories) if category in (ALL, own)]
        sizes = [step_sizes(finished[idx], k) for idx in chosen]
        num_steps = sum(map(len, sizes))
        kept = [sum(size > place for each in sizes for size in each) for place in range(1, k + 1)]
        tokens_N, steps_N = (
            np.array([count(each) for each in sizes], dtype=np.float64) for count in (sum, len)
        )
        length = ratio_estimate(tokens_N, steps_N)
        rows.append(
            AcceptanceRow(
                proposer=name,
                temperature=temperature,
                category=category,
                num_prompts=len(chosen),
                num_steps=num_steps,
                acceptance_length=Estimate(length.value, max(length.lower, 1.0), min(length.upper, k + 1.0)),
                acceptance_rates=tuple(count / num_steps for count in kept),
                repeated_4grams=float(np.mean([repeated_4grams(plain[idx].tokens) for idx in chosen])),
            )
        )
    return rows


def step_sizes(finished: Finished, k: int) -> list[int]:
    """Return how many tokens came out of each step with room for k proposals; the first token comes from the
    prompt, not from a step.
    """
    sizes = []
    num_left = len(finished.tokens) - 1
    for _, arrivals in groupby(finished.token_times_s[1:]):
        size = sum(1 for _ in arrivals)
        if num_left > k:
            sizes.append(size)
        num_left -= size
    return sizes


def repeated_4grams(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that occurred before in `tokens`; 0 where there are fewer than four."""
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
