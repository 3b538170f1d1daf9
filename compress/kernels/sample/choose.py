"""Choose the token of each row, the largest logit or the largest l / T + noise, as in `runtime/sampler.py`.

    _best        (row, span) -> the span's largest logit and the lowest id that has it
    _best_drawn  (row, span) -> the same for scores s + g among tokens with s >= ln min_p;
                                s = (l - max l) / T,  scores in float64
    _merge       row         -> the best of its spans, the lowest id among equals
    _filter      row         -> the best among what top_k and top_p keep, without sorting

g is the sampler's noise of (seed, position, token): the hash in unsigned 64-bit integers, logarithms in
float64. Rows with temperature 0 take their largest logit in every kernel. A row's token depends on its own
logits, parameters and position.

top_k and top_p keep the first tokens in the order of (s, lowest id). So if the token with the best score is
not kept, none after it in that order is, and the best of those before it is the next candidate: one pass over
a row counts the tokens before the candidate, sums their probability and finds the next candidate. A candidate
is kept with the probability of all kept tokens, so with top_p 0.9 nine rows of ten take one pass. The order
of the sums does not matter: probabilities are integers, 2^40 for the likeliest token (`runtime/sampler.py`).

Shapes: R rows, V vocabulary, P spans of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait

SPAN = 2048
DRAWN_SPAN = 1024
"""Number of tokens of one program. For 128,256 logits of 1 and of 64 rows, an H200 takes 2.6 and 6.8 us to
find the largest, and 9.6 and 87 us to draw."""
FILTER_SPAN = 4096
FILTER_WARPS = 32


@dataclass(frozen=True)
class Draw:
    """The parameters that rows are drawn with, each [R]: float32 temperature and ln min_p (minus infinity
    keeps all), int64 seeds and positions.
    """

    temperature_R: Tensor
    log_min_p_R: Tensor
    seeds_R: Tensor
    positions_R: Tensor


@dataclass(frozen=True)
class Filter:
    """The filters of each row: int64 top_k (0 keeps all) and float32 top_p (1 keeps all), each [R]."""

    top_k_R: Tensor
    top_p_R: Tensor


def choose(logits_RV: Tensor) -> Tensor:
    """Return the token with the largest float32 logit of each row, int64 [R]; the lowest id among equals."""
    logits_RV = logits_RV.contiguous()
    best_RP, ids_RP = _best_of_spans(logits_RV, SPAN)
    return _merge_spans(best_RP, ids_RP)


def choose_drawn(logits_RV: Tensor, draw: Draw, filtering: Filter | None = None) -> Tensor:
    """Return tokens int64 [R], drawn where the temperature is above 0 from what `filtering` keeps, else the
    largest.
    """
    (num_rows, vocab_size) = logits_RV.shape
    logits_RV = logits_RV.contiguous()
    best_RP, ids_RP = _best_of_spans(logits_RV, DRAWN_SPAN)
    scores_RP, drawn_RP, mass_RP = (
        torch.empty_like(ids_RP, dtype=dtype) for dtype in (torch.float64, torch.int32, torch.int64)
    )
    filtered_size = 0 if filtering is None else vocab_size  # only `_filter` reads these two
    scaled_RV, scores_RV = (
        logits_RV.new_empty(num_rows, filtered_size, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    outputs = scores_RP, drawn_RP, mass_RP, scaled_RV, scores_RV
    spans = _span_constants(ids_RP)
    options = pdl_options(logits_RV.device)
    _best_drawn[ids_RP.shape](
        *(logits_RV, best_RP, ids_RP, draw.temperature_R, draw.log_min_p_R, draw.seeds_R, draw.positions_R),
        *outputs,
        FILTERS=filtering is not None,
        VOCAB=vocab_size,
        SPAN=DRAWN_SPAN,
        **spans,
        **options,
    )
    if filtering is None:
        return _merge_spans(scores_RP, drawn_RP)
    tokens_R = torch.empty_like(draw.seeds_R)
    _filter[(num_rows,)](
        *(draw.temperature_R, filtering.top_k_R, filtering.top_p_R),
        *outputs,
        tokens_R,
        VOCAB=vocab_size,
        SPAN=FILTER_SPAN,
        num_warps=FILTER_WARPS,
        **spans,
        **options,
    )
    return tokens_R


def _best_of_spans(logits_RV: Tensor, span: int) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_RV.shape
    best_RP = logits_RV.new_empty(num_rows, -(-vocab_size // span))
    ids_RP = torch.empty_like(best_RP, dtype=torch.int32)
    _best[best_RP.shape](
        logits_RV, best_RP, ids_RP, VOCAB=vocab_size, SPAN=span, **pdl_options(logits_RV.device)
    )
    return best_RP, ids_RP


def _merge_spans(best_RP: Tensor, ids_RP: Tensor) -> Tensor:
    tokens_R = torch.empty(best_RP.shape[0], dtype=torch.int64, device=best_RP.device)
    _merge[(best_RP.shape[0],)](
        best_RP, ids_RP, tokens_R, num_warps=1, **_span_constants(ids_RP), **pdl_options(best_RP.device)
    )
    return tokens_R


def _span_constants(ids_RP: Tensor) -> dict[str, int]:
    return {"SPANS": ids_RP.shape[1], "BLOCK": 1 << (ids_RP.shape[1] - 1).bit_length()}


@jit()
def _lowest(scores: tl.tensor, ids: tl.tensor, best: tl.tensor) -> tl.tensor:
    """Return the lowest id whose score is the best, or 0 where the best is not a number."""
    token = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)
    return tl.where(token == 0x7FFFFFFF, 0, token)


@jit()
def _best(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    span = tl.program_id(1)
    ids = span * SPAN + tl.arange(0, SPAN)
    logits = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=-float("inf"))
    place = row * tl.num_programs(1) + span
    best = tl.max(logits, axis=0)
    tl.store(best_ptr + place, best)
    tl.store(ids_ptr + place, _lowest(logits, ids, best))


@jit()
def _best_drawn(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    FILTERS: tl.constexpr,
    VOCAB: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best score of a span. For `_filter`, also store s and the score of every token, and the
    probability of the span.
    """
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    span = tl.program_id(1)
    place = row * SPANS + span
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        spans = tl.arange(0, BLOCK)
        largest = tl.max(
            tl.load(best_ptr + row * SPANS + spans, mask=spans < SPANS, other=-float("inf")), axis=0
        )
        ids = span * SPAN + tl.arange(0, SPAN)
        at = row.to(tl.int64) * VOCAB + ids
        scaled = tl.div_rn(
            tl.load(logits_ptr + at, mask=ids < VOCAB, other=-float("inf")) - largest, temperature
        )
        noise = _gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
        scores = tl.where(
            scaled >= tl.load(log_min_p_ptr + row), scaled.to(tl.float64) + noise, -float("inf")
        )
        best = tl.max(scores, axis=0)
        tl.store(best_score_ptr + place, best)
        tl.store(drawn_ptr + place, _lowest(scores, ids, best))
        if FILTERS:
            tl.store(scaled_ptr + at, scaled, mask=ids < VOCAB)
            tl.store(scores_ptr + at, scores, mask=ids < VOCAB)
            tl.store(mass_ptr + place, tl.sum(_mass(scaled), axis=0))
    else:
        tl.store(best_score_ptr + place, tl.load(best_ptr + place).to(tl.float64))
        tl.store(drawn_ptr + place, tl.load(ids_ptr + place))


@jit()
def _merged(
    best_ptr: tl.tensor, ids_ptr: tl.tensor, row: tl.tensor, SPANS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    spans = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * SPANS + spans, mask=spans < SPANS, other=-float("inf"))
    ids = tl.load(ids_ptr + row * SPANS + spans, mask=spans < SPANS, other=0x7FFFFFFF)
    return _lowest(best, ids, tl.max(best, axis=0))


@jit()
def _merge(
    best_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    tl.store(tokens_ptr + row, _merged(best_ptr, ids_ptr, row, SPANS, BLOCK).to(tl.int64))


@jit()
def _filter(
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best candidate that is kept.

    The loop ends: every candidate comes before the last one, and the first of all tokens is kept. If no token
    has a score, the logits are not numbers.
    """
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    spans = tl.arange(0, BLOCK)
    token = _merged(best_score_ptr, drawn_ptr, row, SPANS, BLOCK)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    kept = (tl.load(temperature_ptr + row) <= 0) | ((top_k == 0) & (top_p >= 1))
    total = tl.sum(tl.load(mass_ptr + row * SPANS + spans, mask=spans < SPANS, other=0), axis=0).to(
        tl.float64
    )
    start = row.to(tl.int64) * VOCAB
    while kept == 0:
        limit = tl.load(scaled_ptr + start + token)
        count = tl.full([SPAN], 0, tl.int32)
        mass = tl.full([SPAN], 0, tl.int64)
        best = tl.full([SPAN], -float("inf"), tl.float64)
        best_ids = tl.full([SPAN], 0x7FFFFFFF, tl.int32)
        for first in range(0, VOCAB, SPAN):
            ids = first + tl.arange(0, SPAN)
            scaled = tl.load(scaled_ptr + start + ids, mask=ids < VOCAB, other=-float("inf"))
            scores = tl.load(scores_ptr + start + ids, mask=ids < VOCAB, other=-float("inf"))
            before = ((scaled > limit) | ((scaled == limit) & (ids < token))) & (ids < VOCAB)
            count += before.to(tl.int32)
            mass += tl.where(before, _mass(scaled), 0)
            better = before & (scores > best)
            best = tl.where(better, scores, best)
            best_ids = tl.where(better, ids, best_ids)
        rank = tl.sum(count, axis=0)
        probability = tl.sum(mass, axis=0).to(tl.float64)
        next_best = tl.max(best, axis=0)
        kept = ((top_k == 0) | (rank < top_k)) & ((top_p >= 1) | (probability < top_p * total))
        kept = kept | (rank == 0) | (next_best == -float("inf"))
        if kept == 0:
            token = _lowest(best, best_ids, next_best)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@jit()
def _mass(scaled: tl.tensor) -> tl.tensor:
    """Return e^s as an integer, 2^40 for 1."""
    return (tl.exp(scaled) * 1099511627776.0).to(tl.int64)


@jit()
def _gumbel(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return standard Gumbel noise in float64 for a seed, a position and tokens."""
    golden = 0x9E3779B97F4A7C15
    key = _mix(_mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)
    bits = _mix(key + (ids + 1).to(tl.uint64) * golden) >> 12
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * (1 / (1 << 52))))


@jit()
def _mix(x: tl.tensor) -> tl.tensor:
    """Return the finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
