"""The expected acceptance length of a draft before it is served, from the distributions of both models on
text.

A token drawn from the draft's q is kept with probability a = sum_v min(p, q) for the target's p (arXiv
2211.17192, corollary 3.6). Steps go through the text one after another: a step that begins at position t
emits its i-th token if a_t .. a_{t+i-2} were all kept, at most K and then the target's own token, and the
next step begins where it ends. With s_t the probability that a step begins at t,

    P(n_t = i) = (1 - a_{t+i-1}) prod_{j < i-1} a_{t+j}  for i <= K,   prod_{j < K} a_{t+j}  for i = K + 1
    s_{t+i} += s_t P(n_t = i),    acceptance length = sum_t s_t E[n_t] / sum_t s_t

Hard places, where steps begin more often, count as often as they are reached; the formula (1 - a^{K+1}) /
(1 - a) for the mean a ignores that. Contexts are those of the text, where a served model has its own.

Shapes: N windows, S positions, K tokens proposed in a step, L = K + 1.
"""

import torch
from torch import Tensor

K = 4
"""Tokens proposed in a step by default."""


def steps_over(kept_NS: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (tokens that come out, steps), both float64 scalars, for acceptance probabilities float64 [N,
    S]; a step has k positions before it in its window."""
    num_starts = max(1, kept_NS.shape[1] - k + 1)
    return steps_through(torch.nn.functional.pad(kept_NS, (0, k)).unfold(1, k, 1)[:, :num_starts])


def steps_through(ahead_NSK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same where proposals depend on the start of their step: [.., i] is the probability that
    proposal i is kept if those before it were."""
    num_starts, k = ahead_NSK.shape[1:]
    reached_NSK = ahead_NSK.cumprod(dim=2)
    all_NSL = torch.cat((torch.ones_like(reached_NSK[..., :1]), reached_NSK), dim=2)  # P(n > i)
    exactly_NSL = torch.cat((all_NSL[..., :-1] - all_NSL[..., 1:], all_NSL[..., -1:]), dim=2)
    begins_NS = ahead_NSK.new_zeros(len(ahead_NSK), num_starts + k + 1)
    begins_NS[:, 0] = 1
    for position in range(num_starts):
        begins_NS[:, position + 1 : position + k + 2] += (
            begins_NS[:, position : position + 1] * exactly_NSL[:, position]
        )
    steps_NS = begins_NS[:, :num_starts]
    return (steps_NS * all_NSL.sum(dim=2)).sum(), steps_NS.sum()
