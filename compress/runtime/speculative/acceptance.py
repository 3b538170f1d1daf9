"""Acceptance rules: which proposed tokens are kept, and which token follows them. No rule relies on the
proposer.

Coupled. The model chooses a token x_j for every position by its own sampler, whose noise is a function of
(seed, position, token), and d_1 .. d_a are kept while d_j = x_j. The new tokens are x_1 .. x_{a+1}: exactly
those of plain decoding, greedy or drawn, whatever was proposed. A proposer that draws with the same noise
agrees with probability (1 - t) / (1 + t) at least, where t is the total variation between its distribution
and the model's (arXiv 2408.07978).

Rejection. Speculative sampling (arXiv 2211.17192, algorithm 1; arXiv 2302.01318): d_j, drawn from q_j with
noise of its own, is kept with probability min(1, p_j(d_j) / q_j(d_j)). The first that is not kept is replaced
by a draw from max(0, p_j - q_j), normalized. A proposal is kept with probability 1 - t, which no rule
exceeds. Tokens have the model's distribution, but differ from those that plain decoding draws. Greedy rows
are coupled. p and q are distributions after temperature, top_k, top_p and min_p.

Forced. For benchmarks alone: a proposal is kept with a given probability, and the tokens are not the model's.

A position draws three independent numbers: the proposal, whether to keep it, and the replacement. Whether and
how often a position is proposed for depends on noise of earlier positions only, so its own noise is fresh
when it counts.

Nothing waits for a value from the device. Shapes: R rows, K tokens proposed, Q = K + 1, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.step.verify import leading
from compress.runtime.sampler import SamplingPlan, SamplingRows, distribution, gumbel, uniform

Rule = Literal["coupled", "rejection"]
PROPOSAL_STREAM = 0x5DEECE66D5DEECE6
KEEP_STREAM = 0x2545F4914F6CDD1D
"""Masks that give the noise of a proposal, and of whether it is kept, seeds of their own (exclusive or with
the seed)."""


@dataclass(frozen=True)
class Kept:
    """The tokens of each row, int64 [R, Q], of which the first `num_accepted` + 1 are new, int64 [R]."""

    tokens_RQ: Tensor
    num_accepted_R: Tensor


def stream(rows: SamplingRows, mask: int) -> SamplingRows:
    """Return the same sampling parameters with independent noise."""
    return replace(rows, seeds_R=rows.seeds_R ^ mask)


def accept_forced(
    chosen_RQ: Tensor, drafts_RK: Tensor, counts_R: Tensor, first_R: Tensor, seeds_R: Tensor, rate: float
) -> Kept:
    """Keep each proposal with probability `rate`, of the first `counts` of each row; `chosen_RQ` are the
    model's own tokens.
    """
    positions_RK = first_R.unsqueeze(1) + torch.arange(drafts_RK.shape[1], device=first_R.device)
    num_accepted_R = leading(_uniform(seeds_R, positions_RK) < rate, counts_R)
    return Kept(
        _followed(drafts_RK, num_accepted_R, chosen_RQ.gather(1, num_accepted_R.unsqueeze(1))), num_accepted_R
    )


def accept_by_rejection(
    logits_RQV: Tensor,
    chosen_RQ: Tensor,
    drafts_RK: Tensor,
    counts_R: Tensor,
    first_R: Tensor,
    rows: SamplingRows,
    plan: SamplingPlan,
    probs_RKV: Tensor | None,
) -> Kept:
    """Keep proposals by rejection sampling in rows that are drawn, and coupled in greedy rows.

    `first_R` is the position of the first proposal; the first `counts_R` proposals count. `probs_RKV` are the
    distributions they were drawn from, None where they are certain. A row that keeps all its proposals goes
    on with the model's own choice, from `chosen_RQ`.
    """
    (num_rows, num_drafts) = drafts_RK.shape
    vocab_size = logits_RQV.shape[2]
    p_RQV = distribution(logits_RQV.flatten(0, 1), rows.repeated(num_drafts + 1), plan).view(
        num_rows, -1, vocab_size
    )
    if probs_RKV is None:
        probs_RKV = torch.zeros_like(p_RQV[:, :-1]).scatter_(2, drafts_RK.unsqueeze(2), 1.0)
    likely_RK, proposed_RK = (
        each.gather(2, drafts_RK.unsqueeze(2)).squeeze(2) for each in (p_RQV[:, :-1], probs_RKV)
    )
    positions_RK = first_R.unsqueeze(1) + torch.arange(num_drafts, device=first_R.device)
    keep_RK = _uniform(rows.seeds_R, positions_RK) * proposed_RK < likely_RK
    drawn_R1 = rows.temperature_R.unsqueeze(1) > 0
    num_accepted_R = leading(torch.where(drawn_R1, keep_RK, drafts_RK == chosen_RQ[:, :-1]), counts_R)

    place_R1 = num_accepted_R.unsqueeze(1)
    own_R1 = chosen_RQ.gather(1, place_R1)
    rejected_R1 = drawn_R1 & (place_R1 < counts_R.unsqueeze(1))
    p_RV, q_RV = (_at(each, place_R1) for each in (p_RQV, probs_RKV))
    noise_RV = gumbel(rows.seeds_R, first_R + num_accepted_R, vocab_size)
    more_RV = (p_RV - q_RV).clamp(min=0)
    # Where p equals q within rounding nothing is left, and p itself serves as well.
    more_RV = torch.where(more_RV.amax(dim=1, keepdim=True) > 0, more_RV, p_RV)
    instead_R1 = (more_RV.log() + noise_RV).argmax(dim=1, keepdim=True)
    return Kept(
        _followed(drafts_RK, num_accepted_R, torch.where(rejected_R1, instead_R1, own_R1)), num_accepted_R
    )


def _followed(drafts_RK: Tensor, num_accepted_R: Tensor, last_R1: Tensor) -> Tensor:
    """Return tokens [R, Q]: the proposals that are kept, then the last token."""
    return torch.cat((drafts_RK, last_R1), dim=1).scatter(1, num_accepted_R.unsqueeze(1), last_R1)


def _at(each_RJV: Tensor, place_R1: Tensor) -> Tensor:
    """Return [R, V] at a place of each row, limited to the last place."""
    place_R1 = place_R1.clamp(max=each_RJV.shape[1] - 1)
    return each_RJV.gather(1, place_R1.unsqueeze(2).expand(-1, -1, each_RJV.shape[2])).squeeze(1)


def _uniform(seeds_R: Tensor, positions_RK: Tensor) -> Tensor:
    seeds_RK = (seeds_R ^ KEEP_STREAM).unsqueeze(1).expand_as(positions_RK)
    return uniform(seeds_RK.flatten(), positions_RK.flatten(), 1).view(positions_RK.shape)
