"""From logits to tokens. Greedy, or Gumbel-max (arXiv 1611.01144) with noise that is a pure function of (seed, position, token id).

    greedy        argmax l, the lowest id among equals
    otherwise     argmax over the kept tokens of l / T + g,   g = -ln(-ln u),  u = hash(seed, position, token) in (0, 1)

which draws token v with probability softmax(l / T)_v among the kept. No generator state: a sequence does not change with the batch it
runs in, its place there, preemption, or how a vocabulary is split over devices. The hash applies the finalizer of splitmix64 (doi
10.1145/2660193.2660195) once each for seed, position and token, in int64 arithmetic that wraps, the same on every device; the logarithms
are float64, so that devices disagree in the 16th digit at most.

Filters look at p = softmax(l / T) of all tokens and apply together: `top_k` keeps the k likeliest, `top_p` the smallest set of likeliest
tokens whose probability reaches it, `min_p` those with p >= min_p * max p. The likeliest token is always kept.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.runtime.request import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@dataclass(frozen=True)
class Choice:
    """Chosen tokens int64 [R] and the log probabilities float32 [R] of them under softmax(l), or None when no row asked."""

    tokens_R: Tensor
    logprobs_R: Tensor | None


def sample(logits_RV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Choice:
    """One token a row; `positions` are the absolute positions of the new tokens in their sequences."""
    logits_RV = logits_RV.to(torch.float32)
    tokens_R = logits_RV.argmax(dim=-1)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits_RV.device)
        tokens_R[rows] = _draw(logits_RV[rows], [params[row] for row in drawn], [positions[row] for row in drawn])
    if not any(each.logprobs for each in params):
        return Choice(tokens_R, None)
    return Choice(tokens_R, logits_RV.log_softmax(dim=-1).gather(1, tokens_R.unsqueeze(1)).squeeze(1))


def _draw(logits_RV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    device = logits_RV.device
    temperature = torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device)
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)  # the maximum is 0 at any temperature
    kept_RV = _kept(scaled_RV, params)
    seeds = torch.tensor([each.seed for each in params], dtype=torch.int64, device=device)
    noise_RV = gumbel(seeds, torch.tensor(positions, dtype=torch.int64, device=device), logits_RV.shape[1])
    return (scaled_RV.to(torch.float64) + noise_RV).masked_fill(~kept_RV, float("-inf")).argmax(dim=-1)


def _kept(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """bool [R, V] for logits whose maximum is 0."""
    device, vocab_size = scaled_RV.device, scaled_RV.shape[1]
    min_p = torch.tensor([each.min_p for each in params], dtype=torch.float32, device=device).unsqueeze(1)
    kept_RV = scaled_RV >= min_p.log()
    if all(each.top_k == 0 and each.top_p == 1.0 for each in params):
        return kept_RV
    top_k = torch.tensor([each.top_k or vocab_size for each in params], device=device).unsqueeze(1)
    # A rounded sum of all probabilities may fall short of 1, so that `top_p` 1 could drop the last tokens: it asks for more instead.
    top_p = torch.tensor([each.top_p if each.top_p < 1 else 2.0 for each in params], dtype=torch.float32, device=device).unsqueeze(1)
    ordered_RV, ids_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    p_RV = ordered_RV.softmax(dim=-1)
    before_RV = p_RV.cumsum(dim=-1) - p_RV
    rank_V = torch.arange(vocab_size, device=device)
    first_RV = (rank_V < top_k) & (before_RV < top_p)
    first_RV[:, 0] = True
    return kept_RV & torch.empty_like(kept_RV).scatter_(1, ids_RV, first_RV)


def gumbel(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise float64 [R, V] for int64 seeds and positions."""
    tokens_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seeds_R.device)
    key_R = _mix(_mix(seeds_R + _GOLDEN) + positions_R * _GOLDEN)
    bits_RV = _shift_right(_mix(key_R.unsqueeze(1) + tokens_V * _GOLDEN), 12)
    u_RV = (bits_RV.to(torch.float64) + 0.5) * 2.0**-52  # 52 bits and a half: exact, and never 0 or 1
    return -(-u_RV.log()).log()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
