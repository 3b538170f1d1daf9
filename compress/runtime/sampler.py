"""Sampling: choose tokens from logits, greedily or by Gumbel-max (arXiv 1611.01144) with reproducible noise.

    greedy        argmax l, the lowest id among equals
    otherwise     argmax over the kept tokens of l / T + g,
                  g = -ln(-ln u),  u = hash(seed, position, token) in (0, 1)

which draws token v with probability softmax(l / T)_v among the kept. The noise is a pure function of (seed,
position, token id), without generator state: a sequence does not change with the batch it runs in, its place
there, preemption, or how a vocabulary is split over devices. The hash applies the finalizer of splitmix64
(doi 10.1145/2660193.2660195) once each for seed, position and token, in int64 arithmetic that wraps, the same
on every device. The logarithms are float64, so that devices disagree in the 16th digit at most.

All filters apply to p = softmax(l / T) of all tokens: `top_k` keeps the k likeliest, `top_p` the smallest set
of likeliest tokens whose probability reaches it, `min_p` those with p >= min_p * max p. The likeliest token
is always kept.

Parameters are tensors, and nothing waits for a value from the device, so a CUDA graph can capture every plan.
The plan of a batch (`SamplingPlan`) is made on the host and saves work. Rows of one batch may differ in all
parameters; a row's token is the same under every plan that serves it.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import triton
from compress.kernels.sample.choose import Draw, Filter, choose, choose_drawn
from compress.kernels.step.host_memory import sent
from compress.runtime.request import SamplingParams, TopLogprobs

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_MASS_BITS = 40
"""Probabilities are summed as truncated integers, 2^40 for the likeliest token: sums are exact, so they do
not depend on how a device shares out a row among threads, and stay below 2^63 for vocabularies up to 2^23."""
_GREEDY = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class SamplingPlan:
    """The work that a batch needs for any of its rows: drawing, filtering by top_k or top_p, log
    probabilities.
    """

    draws: bool
    filters: bool
    logprobs: bool

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "SamplingPlan":
        """Return the plan with the least work that serves all rows."""
        drawn = [each for each in params if each.temperature > 0]
        filters = any(each.top_k > 0 or each.top_p < 1 for each in drawn)
        return SamplingPlan(
            draws=bool(drawn), filters=filters, logprobs=any(each.logprobs for each in params)
        )


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of each row, on the device: float32 temperature, top_p and min_p, int64 top_k
    and seeds.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seeds_R: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device, *, pad_to: int = 0) -> "SamplingRows":
        """Return the parameters of these requests, followed by greedy rows up to `pad_to`."""
        params = [*params, *[_GREEDY] * (pad_to - len(params))]

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return sent(torch.tensor([getattr(each, name) for each in params], dtype=dtype), device)

        temperature_R, top_p_R, min_p_R = (
            column(name, torch.float32) for name in ("temperature", "top_p", "min_p")
        )
        return SamplingRows(
            temperature_R, column("top_k", torch.int64), top_p_R, min_p_R, column("seed", torch.int64)
        )

    def first(self, num_rows: int) -> "SamplingRows":
        """Return views of the first rows."""
        return SamplingRows(*(each[:num_rows] for each in self._tensors))

    def repeated(self, count: int) -> "SamplingRows":
        """Return each row `count` times, one after the other, as contiguous tensors, which kernels need.

        For a single row, `flatten` of the expanded tensor would be a view of one number.
        """
        return SamplingRows(
            *(each.unsqueeze(1).expand(-1, count).flatten().contiguous() for each in self._tensors)
        )

    def copy_(self, other: "SamplingRows") -> None:
        """Copy the parameters of `other` into these tensors."""
        for tensor, source in zip(self._tensors, other._tensors, strict=True):
            tensor.copy_(source)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.temperature_R, self.top_k_R, self.top_p_R, self.min_p_R, self.seeds_R


@dataclass(frozen=True)
class SampledTokens:
    """The tokens chosen, int64 [R], and their log probabilities under softmax(l), float32 [R], or None if no
    row needs them.
    """

    tokens_R: Tensor
    logprobs_R: Tensor | None


def sample(logits_RV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> SampledTokens:
    """Choose one token for each row; `positions` are the absolute positions of the new tokens in their
    sequences.
    """
    device = logits_RV.device
    positions_R = sent(torch.tensor(positions, dtype=torch.int64), device)
    return sample_rows(
        logits_RV.to(torch.float32), SamplingRows.of(params, device), positions_R, SamplingPlan.of(params)
    )


def sample_rows(
    logits_RV: Tensor, rows: SamplingRows, positions_R: Tensor, plan: SamplingPlan
) -> SampledTokens:
    """Choose one token for each row of float32 logits, from parameters on their device; `plan` must serve
    every row.
    """
    tokens_R = _tokens(logits_RV, rows, positions_R, plan)
    if not plan.logprobs:
        return SampledTokens(tokens_R, None)
    return SampledTokens(tokens_R, logits_RV.log_softmax(dim=-1).gather(1, tokens_R.unsqueeze(1)).squeeze(1))


def _tokens(logits_RV: Tensor, rows: SamplingRows, positions_R: Tensor, plan: SamplingPlan) -> Tensor:
    by_kernel = logits_RV.is_cuda and triton is not None
    if not plan.draws:
        return choose(logits_RV) if by_kernel else logits_RV.argmax(dim=-1)
    if by_kernel:
        draw = Draw(rows.temperature_R, rows.min_p_R.log(), rows.seeds_R, positions_R)
        return choose_drawn(logits_RV, draw, Filter(rows.top_k_R, rows.top_p_R) if plan.filters else None)
    scaled_RV, kept_RV = _kept(logits_RV, rows, filters=plan.filters)
    noisy_RV = scaled_RV.to(torch.float64) + gumbel(rows.seeds_R, positions_R, logits_RV.shape[1])
    drawn_R = noisy_RV.masked_fill(~kept_RV, float("-inf")).argmax(dim=-1)
    return torch.where(rows.temperature_R > 0, drawn_R, logits_RV.argmax(dim=-1))


def distribution(logits_RV: Tensor, rows: SamplingRows, plan: SamplingPlan) -> Tensor:
    """Return the float64 probabilities [R, V] that rows with a temperature are drawn with; for greedy rows
    those of T = 1.
    """
    scaled_RV, kept_RV = _kept(logits_RV, rows, filters=plan.filters)
    return scaled_RV.to(torch.float64).masked_fill(~kept_RV, float("-inf")).softmax(dim=-1)


def _kept(logits_RV: Tensor, rows: SamplingRows, *, filters: bool) -> tuple[Tensor, Tensor]:
    """Return (l - max l) / T, float32 [R, V], and which tokens are kept, bool [R, V], by min_p and with
    `filters` by all.

    Greedy rows use T = 1. The maximum is 0 at any temperature.
    """
    temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R.unsqueeze(1)
    kept_RV = scaled_RV >= rows.min_p_R.log().unsqueeze(1)
    return scaled_RV, kept_RV & _first(scaled_RV, rows) if filters else kept_RV


def _first(scaled_RV: Tensor, rows: SamplingRows) -> Tensor:
    """Return which tokens top_k and top_p keep, bool [R, V]."""
    ordered_RV, ids_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    mass_RV = (ordered_RV.exp() * 2.0**_MASS_BITS).to(torch.int64)
    total_RV = mass_RV.cumsum(dim=-1)
    before_RV = total_RV - mass_RV
    top_p_R1 = rows.top_p_R.unsqueeze(1).to(torch.float64)
    rank_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    top_k_R1 = rows.top_k_R.unsqueeze(1)
    first_RV = (before_RV < top_p_R1 * total_RV[:, -1:]) | (top_p_R1 >= 1)
    first_RV &= (rank_V < top_k_R1) | (top_k_R1 == 0)
    return torch.empty_like(first_RV).scatter_(1, ids_RV, first_RV | (rank_V == 0))


def gumbel(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float64 [R, V], for int64 seeds and positions."""
    return -(-uniform(seeds_R, positions_R, vocab_size).log()).log()


def uniform(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """Return random numbers between 0 and 1, both excluded, float64 [R, V]: one for each token of the
    vocabulary, a function of seed, position and token alone."""
    tokens_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seeds_R.device)
    key_R = _mix(_mix(seeds_R + _GOLDEN) + positions_R * _GOLDEN)
    bits_RV = _shift_right(_mix(key_R.unsqueeze(1) + tokens_V * _GOLDEN), 12)
    return (bits_RV.to(torch.float64) + 0.5) * 2.0**-52  # 52 bits and a half: exact, and never 0 or 1


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; torch's `>>` on int64 copies the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def likeliest(logits_TV: Tensor, count: int) -> list[TopLogprobs]:
    """Return the `count` likeliest tokens of each row under softmax(l), with their log probabilities."""
    logprobs_TV = logits_TV.to(torch.float32).log_softmax(dim=-1)
    top = logprobs_TV.topk(min(count, logprobs_TV.shape[-1]), dim=-1)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [tuple(zip(tokens, values, strict=True)) for tokens, values in rows]
