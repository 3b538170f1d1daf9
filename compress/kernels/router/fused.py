"""Router of the rows of prompts: logits are one product of the library, and a launch chooses for each row.

The choice takes the largest key K times; a key is the compared number as an integer of the same order, then
the id, so that of equal numbers the lowest id is first.

Shapes: T rows, D hidden, E experts, K choices.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.operands.routing import RouterWeights, chosen_by_table
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.experts import Experts
from compress.models.moe import FLOORED, SUM_FLOOR

SCORE_CODES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2, "sparsemixer": 3, "sqrt_softplus": 4}


@jit()
def _choose(
    logits: tl.tensor,
    row: tl.tensor,
    selection_bias_ptr: tl.tensor,
    output_scale_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    E: tl.constexpr,
    E2: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    BIASED_LOGITS: tl.constexpr,
    ZEROES_GROUPS: tl.constexpr,
    LEAST: tl.constexpr,
    GAP: tl.constexpr,
    TABLE: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    """Choose for one row. Each group takes up a power of two of its logits [E2], the last of which are -inf
    and of no expert."""
    SPAN: tl.constexpr = E2 // GROUPS
    MEMBERS: tl.constexpr = E // GROUPS
    places = tl.arange(0, E2)
    if SCORE == 0:
        most = tl.max(logits, axis=0)
        exponents = tl.exp(logits - most)
        total = tl.sum(exponents, axis=0)
        scores = exponents / total
    elif SCORE == 1:
        scores = 1 / (1 + tl.exp(-logits))
    elif SCORE == 4:
        scores = tl.sqrt(tl.maximum(logits, 0.0) + _log_1_plus(tl.exp(-tl.abs(logits))))
    else:
        scores = logits
    BY_LOGIT: tl.constexpr = SCORE == 0 and not SELECTION_BIAS and GROUPS == 1 and not TABLE
    compared = logits if BY_LOGIT or BIASED_LOGITS else scores
    if SELECTION_BIAS:
        at_bias = selection_bias_ptr + places // SPAN * MEMBERS + places % SPAN
        compared += tl.load(at_bias, mask=places % SPAN < MEMBERS, other=0.0)
    keys = tl.where(places % SPAN < MEMBERS, _keys(compared, E2), -(1 << 63))
    if GROUPS > 1:
        by_group = tl.reshape(keys, [GROUPS, E2 // GROUPS])
        first = tl.max(by_group, axis=1)
        worth = _number(first)
        if GROUP_BEST > 1:
            second = tl.max(tl.where(by_group == first[:, None], -(1 << 63), by_group), axis=1)
            worth = tl.where(second > -(1 << 63), worth + _number(second), worth)
        worth_keys = _keys(worth, GROUPS)
        kept = worth_keys != worth_keys
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(worth_keys, axis=0)
            kept = kept | (worth_keys == best)
            worth_keys = tl.where(worth_keys == best, -(1 << 63), worth_keys)
        if ZEROES_GROUPS:
            zeros = tl.where(places % SPAN < MEMBERS, _keys(tl.zeros([E2], dtype=tl.float32), E2), -(1 << 63))
            others = tl.reshape(zeros, [GROUPS, E2 // GROUPS])
        else:  # a group that is out keeps its order below all that are in
            others = -(1 << 63) + (by_group & 0xFFFFFFFF)
        keys = tl.reshape(tl.where(kept[:, None], by_group, others), [E2])
    columns = tl.arange(0, K2)
    chosen = tl.zeros([K2], dtype=tl.int32)
    weights = tl.full([K2], float("-inf") if SCORE == 2 else 0.0, dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.max(keys, axis=0)
        if TABLE:
            place = tl.load(table_ptr + tl.load(tokens_ptr + row) * K + k).to(tl.int32)
        else:
            place = (E2 - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        if SELECTION_BIAS or TABLE:
            score = tl.sum(tl.where(places == place, scores, 0.0), axis=0)
        else:
            score = _number(best)
        if SCORE == 3:
            near = (keys > -(1 << 63)) & (score - logits <= GAP * tl.maximum(tl.abs(logits), score))
            score = 1 / tl.sum(tl.where(near, tl.exp(logits - score), 0.0), axis=0)
        chosen = tl.where(columns == k, place // SPAN * MEMBERS + place % SPAN, chosen)
        weights = tl.where(columns == k, score, weights)
        keys = tl.where(places == place, -(1 << 63), keys)
    if BY_LOGIT:
        weights = tl.where(columns < K, tl.exp(weights - most) / total, 0.0)
    if SCORE == 2:
        exponents = tl.exp(weights - tl.max(weights, axis=0))
        weights = exponents / tl.sum(exponents, axis=0)
    elif RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + LEAST)
    if output_scale_ptr is not None:
        weights *= tl.load(output_scale_ptr + chosen)
    weights *= SCALE
    if SHARED > 0:
        chosen = tl.where(columns < K, chosen, E + columns - K)
        weights = tl.where(columns < K, weights, 1.0)
    at = row * (K + SHARED) + columns
    tl.store(ids_ptr + at, chosen, mask=columns < K + SHARED)
    tl.store(weights_ptr + at, weights, mask=columns < K + SHARED)


@jit()
def _keys(numbers: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return int64 keys in the order of float32 numbers, of equal ones the lowest index largest."""
    index = tl.arange(0, SIZE)
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (SIZE - 1 - index).to(tl.int64)


@jit()
def _log_1_plus(numbers: tl.tensor) -> tl.tensor:
    """Return log(1 + x) of numbers from 0 to 1, of small ones too: what 1 + x loses of x is made up for."""
    more = 1 + numbers
    added = more - 1
    return tl.where(added == 0, numbers, tl.log(more) * (numbers / tl.where(added == 0, 1.0, added)))


@jit()
def _number(keys: tl.tensor) -> tl.tensor:
    """Return the float32 numbers of keys."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _choose_rows(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    selection_bias_ptr: tl.tensor,
    output_scale_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    BIAS: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    E: tl.constexpr,
    E2: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    BIASED_LOGITS: tl.constexpr,
    ZEROES_GROUPS: tl.constexpr,
    LEAST: tl.constexpr,
    GAP: tl.constexpr,
    TABLE: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    SPAN: tl.constexpr = E2 // GROUPS
    MEMBERS: tl.constexpr = E // GROUPS
    places = tl.arange(0, E2)
    ids = places // SPAN * MEMBERS + places % SPAN
    is_expert = places % SPAN < MEMBERS
    logits = tl.load(logits_ptr + row * E + ids, mask=is_expert, other=float("-inf"))
    if BIAS:
        logits += tl.load(bias_ptr + ids, mask=is_expert, other=0.0)
    logits = tl.where(is_expert, logits * LOGIT_SCALE, float("-inf"))
    _choose(
        logits, row, selection_bias_ptr, output_scale_ptr, tokens_ptr, table_ptr, ids_ptr, weights_ptr, E, E2,
        K, K2, SCORE, RENORMALIZE, SCALE, GROUPS, TOP_GROUPS, GROUP_BEST, SELECTION_BIAS, BIASED_LOGITS,
        ZEROES_GROUPS, LEAST, GAP, TABLE, SHARED,
    )  # fmt: skip


def _constants(router: RouterWeights, facts: Experts, shared: int) -> dict[str, Any]:
    return {
        "BIAS": router.bias_E is not None,
        "LOGIT_SCALE": facts.router_scale,
        "E": facts.num_experts,
        "E2": facts.num_groups * _power_of_two(facts.num_experts // facts.num_groups),
        "K": facts.top_k,
        "K2": _power_of_two(facts.top_k + shared),
        "SCORE": SCORE_CODES[facts.score],
        "RENORMALIZE": facts.renormalize,
        "SCALE": facts.scale,
        "GROUPS": facts.num_groups,
        "TOP_GROUPS": facts.top_groups,
        "GROUP_BEST": facts.group_best,
        "SELECTION_BIAS": facts.selection_bias,
        "BIASED_LOGITS": facts.biased_logits,
        "ZEROES_GROUPS": facts.zeroes_groups,
        "LEAST": SUM_FLOOR if facts.score in FLOORED else 0.0,
        "GAP": facts.gap,
        "TABLE": bool(facts.table_size),
        "SHARED": shared,
    }


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 1).bit_length()


def route_many(
    x_TD: Tensor,
    router: RouterWeights,
    facts: Experts,
    *,
    shared: int = 0,
    tokens_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K]; a row's bits may depend on the number of rows."""
    assert router.weight_ED.shape == (facts.num_experts, x_TD.shape[1])
    assert (router.selection_bias_E is not None) == facts.selection_bias
    assert (router.output_scale_E is not None) == facts.scales_weights
    assert _power_of_two(facts.num_groups) == facts.num_groups or facts.num_groups == 1
    tokens_T, table_VK = chosen_by_table(router, facts, len(x_TD), tokens_T)
    if x_TD.dtype == torch.float32 or x_TD.device.type == "cpu":
        logits_TE = x_TD.float() @ router.weight_ED.float().t()
    else:
        logits_TE = torch.mm(x_TD, router.weight_ED.t(), out_dtype=torch.float32)
    shape = len(x_TD), facts.top_k + shared
    ids_TK = torch.empty(shape, dtype=torch.int32, device=x_TD.device)
    weights_TK = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
    if len(x_TD) > 0:
        _choose_rows[(len(x_TD),)](
            logits_TE,
            router.bias_E,
            router.selection_bias_E,
            router.output_scale_E,
            tokens_T,
            table_VK,
            ids_TK,
            weights_TK,
            **_constants(router, facts, shared),
            num_warps=1,
            **pdl_options(x_TD.device),
        )
    return ids_TK, weights_TK


def _many(problem: Problem) -> str | None:
    if problem.row_invariant:
        return "a row's bits depend on the number of rows"
    if refusal := triton_refusal(problem):
        return refusal
    if problem.expert_groups > 1 and _power_of_two(problem.expert_groups) != problem.expert_groups:
        return f"chooses a power of two of groups of experts, not {problem.expert_groups}"
    return None


register(Kernel("router", "triton.product", min_sm=80, priority=10, supports=_many, fn=route_many))
