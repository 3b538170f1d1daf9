"""Accuracy of a candidate against its source, on the same tokens.

    perplexity       exp(mean NLL) over non-overlapping windows of S tokens, positions 1..S-1 of each window
                     ("convention A": raw text joined with blank lines, no tail). lm-eval's `wikitext` and
                     llama.cpp's number are other quantities.
    bits per byte    total NLL / ln 2 / bytes: comparable between tokenizers.
    KL(p || q)       source p, candidate q, per token, over the full vocabulary, from fp32 log-softmax.
    top-1            share of positions where both have the same most likely token.

KL is summed as sum_v p d + p expm1(-d), d = log p - log q. The added part sums to sum q - sum p = 0, and
makes every term non-negative and second order in d: rounding of the log-softmax, which the plain sum p d
feels to first order, cancels (a KL of 1e-9 keeps its digits in fp32).

Windows are scored one by one and reduced in window order, so the result has the same bits whatever the batch
size, provided that the two models give the same logits whatever the batch size. Logits of one batch of each
model are the most that is held.

Shapes: N windows, B windows in a batch, S tokens of a window, T = S - 1 scored positions, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import GateFailed, UsageError
from compress.validate.stats import (
    Array,
    Estimate,
    mean_estimate,
    minimum_detectable_effect,
    quantile_estimate,
)

Logits = Callable[[Tensor], Tensor]  # tokens_BS (int64) -> logits_BSV (any float dtype)

ACCURACY_METRICS = ("ppl_ratio", "bits_per_byte", "kl_mean", "kl_p99", "kl_p999", "kl_max", "top1")
"""Names of the numbers that gates may limit."""
CONVENTION = "A: mean NLL over non-overlapping windows, positions 1..S-1, tail dropped"
ROWS_AT_ONCE = 128  # x 128,256 words x 4 bytes = 66 MB for each fp32 temporary
MAX_LISTED = 4096
"""The most windows whose means are kept one by one: four numbers a window, 300 kB of a report."""
_KL_EDGES = np.logspace(-8, 2, 81)  # eight bins a decade; what lies outside is counted in the end bins


@dataclass(frozen=True)
class WindowMeans:
    """The mean of every window, in window order, so that two candidates are compared window by window."""

    nll_source: tuple[float, ...]
    nll_candidate: tuple[float, ...]
    kl: tuple[float, ...]
    top1: tuple[float, ...]


@dataclass(frozen=True)
class Accuracy:
    """Differences between source and candidate. Intervals are two-sided at `confidence`, over windows."""

    convention: str
    confidence: float
    num_windows: int
    window_size: int
    num_tokens: int  # scored positions: num_windows * (window_size - 1)
    num_bytes: int
    ppl_source: Estimate
    ppl_candidate: Estimate
    ppl_ratio: Estimate  # paired: candidate over source
    ppl_ratio_mde: float  # the smallest ratio above 1 that this much text would show with 80 % power
    bits_per_byte_source: Estimate
    bits_per_byte: Estimate
    kl_mean: Estimate
    kl_p50: Estimate
    kl_p99: Estimate
    kl_p999: Estimate
    kl_max: float
    top1: Estimate
    kl_bin_edges: tuple[float, ...]
    kl_bin_counts: tuple[int, ...]
    windows: WindowMeans | None = None  # None: more than MAX_LISTED

    def metrics(self) -> dict[str, Estimate]:
        return {
            name: Estimate.exact(self.kl_max) if name == "kl_max" else getattr(self, name)
            for name in ACCURACY_METRICS
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WindowScores:
    """One window on the host: a value for each of its T scored positions."""

    nll_source: Tensor  # fp32
    nll_candidate: Tensor
    kl: Tensor
    same_top1: Tensor  # bool


def measure_accuracy(
    source: Logits,
    candidate: Logits,
    tokens_NS: Tensor,
    *,
    num_bytes: int,
    batch_size: int = 4,
    confidence: float = 0.95,
) -> Accuracy:
    """Score both models on the same windows; see `measure_pairs`."""
    models = (source, candidate)
    pairs = ((0, 1),)
    return measure_pairs(
        models, pairs, tokens_NS, num_bytes=num_bytes, batch_size=batch_size, confidence=confidence
    )[0]


def measure_pairs(
    models: Sequence[Logits],
    pairs: Sequence[tuple[int, int]],
    tokens_NS: Tensor,
    *,
    num_bytes: int,
    batch_size: int = 4,
    confidence: float = 0.95,
) -> list[Accuracy]:
    """Score every model once on the same windows, and compare the given pairs.

    Args:
        pairs: of indices, source and candidate.
        tokens_NS: token ids, one window a row, on the device that all callables expect.
        num_bytes: UTF-8 bytes of the text that the scored tokens (all but the first of each window) encode.

    Raises:
        UsageError: fewer than two windows (no uncertainty can be stated), windows of one token, or a source
        that gives no finite numbers. GateFailed: the candidate gives logits that are not numbers; no gate
        could accept it.
    """
    num_windows, window_size = tokens_NS.shape
    if num_windows < 2 or window_size < 2 or num_bytes < 1:
        raise UsageError(
            "validation needs at least two windows of at least two tokens, and their bytes; here: "
            f"{num_windows} windows of "
            f"{window_size} tokens, {num_bytes} bytes. Give more evaluation text or a smaller seq_len."
        )
    scores: list[list[WindowScores]] = [[] for _ in pairs]
    with torch.inference_mode():
        for start in range(0, num_windows, batch_size):
            tokens_BS = tokens_NS[start : start + batch_size]
            logits = [model(tokens_BS) for model in models]
            for found, (source_idx, candidate_idx) in zip(scores, pairs, strict=True):
                source_BSV = logits[source_idx]
                candidate_BSV = logits[candidate_idx]
                if source_BSV.shape != candidate_BSV.shape or source_BSV.shape[:2] != tokens_BS.shape:
                    raise UsageError(
                        f"source logits {tuple(source_BSV.shape)} and candidate logits "
                        f"{tuple(candidate_BSV.shape)} for tokens "
                        f"{tuple(tokens_BS.shape)} cannot be compared: both models must share one "
                        "vocabulary and score every position."
                    )
                for row in range(tokens_BS.shape[0]):
                    found.append(score_window(source_BSV[row], candidate_BSV[row], tokens_BS[row]))
                    check_scores(found[-1], window=start + row)
    return [
        summarize(each, window_size=window_size, num_bytes=num_bytes, confidence=confidence)
        for each in scores
    ]


def score_window(source_SV: Tensor, candidate_SV: Tensor, tokens_S: Tensor) -> WindowScores:
    """Return NLL, KL and top-1 agreement at the positions that predict tokens 1..S-1.

    Rows are taken a fixed number at a time to bound memory.
    """
    parts: list[tuple[Tensor, ...]] = []
    num_scored = tokens_S.shape[0] - 1
    for start in range(0, num_scored, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, num_scored)
        source_TV = source_SV[start:end].to(torch.float32)
        candidate_TV = candidate_SV[start:end].to(torch.float32)
        target_T1 = tokens_S[start + 1 : end + 1, None].to(source_TV.device, torch.int64)
        log_p_TV = source_TV.log_softmax(dim=-1)
        log_q_TV = candidate_TV.log_softmax(dim=-1)
        same_T = source_TV.argmax(dim=-1) == candidate_TV.argmax(dim=-1)
        nll_source_T, nll_candidate_T = (
            -log_TV.gather(1, target_T1)[:, 0] for log_TV in (log_p_TV, log_q_TV)
        )
        parts.append((nll_source_T, nll_candidate_T, kl_divergence(log_p_TV, log_q_TV), same_T))
    return WindowScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def kl_divergence(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    """Return KL(p || q) of each row [T] from log-probabilities; a word that both exclude (-inf) adds
    nothing."""
    p_TV = log_p_TV.exp()
    q_TV = log_q_TV.exp()
    d_TV = log_p_TV - log_q_TV
    # p expm1(-d) is q - p without cancellation; for d << 0 it would overflow where q - p is exact enough.
    balance_TV = torch.where(d_TV < -1, q_TV - p_TV, p_TV * torch.expm1(-d_TV))
    return torch.where(p_TV > 0, p_TV * d_TV + balance_TV, q_TV).sum(dim=-1).clamp_min(0.0)


def check_scores(scores: WindowScores, *, window: int) -> None:
    """Check that the scores of a window are numbers.

    Raises:
        UsageError: those of the source are not. GateFailed: those of the candidate.
    """
    if not bool(scores.nll_source.isfinite().all()):
        raise UsageError(
            f"the source model gives logits that are not finite in evaluation window {window}; check the "
            "checkpoint and its dtype."
        )
    if not bool((scores.nll_candidate.isfinite() & scores.kl.isfinite()).all()):
        raise GateFailed(
            f"the candidate gives logits that are not finite in evaluation window {window}: it is broken, "
            "not merely worse. "
            "Inspect its scales (zeros, overflow in float16) before looking at any number."
        )


def summarize(
    scores: list[WindowScores], *, window_size: int, num_bytes: int, confidence: float = 0.95
) -> Accuracy:
    """Return the differences that the scores of all windows make."""
    nll_source_NT, nll_candidate_NT, kl_NT, same_NT = (
        _stack(scores, name) for name in ("nll_source", "nll_candidate", "kl", "same_top1")
    )
    source_N = _window_means(nll_source_NT)
    candidate_N = _window_means(nll_candidate_NT)
    num_tokens = kl_NT.size
    bits = num_tokens / num_bytes / math.log(2)
    kl_N = _window_means(kl_NT)
    same_N = _window_means(same_NT)
    nll_source = mean_estimate(source_N, confidence=confidence)
    nll_candidate = mean_estimate(candidate_N, confidence=confidence)
    top1 = mean_estimate(same_N, confidence=confidence)
    kl_mean = mean_estimate(kl_N, confidence=confidence)
    counts, _ = np.histogram(np.clip(kl_NT, _KL_EDGES[0], _KL_EDGES[-1]), bins=_KL_EDGES)
    return Accuracy(
        convention=CONVENTION,
        confidence=confidence,
        num_windows=len(scores),
        window_size=window_size,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        ppl_source=_exp(nll_source),
        ppl_candidate=_exp(nll_candidate),
        ppl_ratio=_exp(mean_estimate(candidate_N - source_N, confidence=confidence)),
        ppl_ratio_mde=math.exp(minimum_detectable_effect(candidate_N - source_N, confidence=confidence)),
        bits_per_byte_source=Estimate(
            nll_source.value * bits, nll_source.lower * bits, nll_source.upper * bits
        ),
        bits_per_byte=Estimate(
            nll_candidate.value * bits, nll_candidate.lower * bits, nll_candidate.upper * bits
        ),
        kl_mean=Estimate(kl_mean.value, max(kl_mean.lower, 0.0), kl_mean.upper),
        kl_p50=quantile_estimate(kl_NT, 0.5, confidence=confidence),
        kl_p99=quantile_estimate(kl_NT, 0.99, confidence=confidence),
        kl_p999=quantile_estimate(kl_NT, 0.999, confidence=confidence),
        kl_max=float(kl_NT.max()),
        top1=Estimate(top1.value, max(top1.lower, 0.0), min(top1.upper, 1.0)),
        kl_bin_edges=tuple(_KL_EDGES.tolist()),
        kl_bin_counts=tuple(counts.tolist()),
        windows=WindowMeans(*(tuple(each.tolist()) for each in (source_N, candidate_N, kl_N, same_N)))
        if len(scores) <= MAX_LISTED
        else None,
    )


def _stack(scores: list[WindowScores], name: str) -> Array:
    return torch.stack([getattr(score, name) for score in scores]).to(torch.float64).numpy()


def _window_means(values_NT: Array) -> Array:
    """Exactly rounded sums, so that a mean does not depend on the shape of the array it was taken from."""
    return np.array([math.fsum(row) / len(row) for row in values_NT.tolist()])


def _exp(estimate: Estimate) -> Estimate:
    return Estimate(math.exp(estimate.value), math.exp(estimate.lower), math.exp(estimate.upper))
