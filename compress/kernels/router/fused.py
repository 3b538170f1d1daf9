"""Router of few or many rows: logits, scores, the choice and its weights, in one launch for few rows.

A program computes the logits of `EXPERTS_PER_PROGRAM` experts, row after row, by sums over whole rows of the
router weight in float32, in an order that follows from D alone. Of up to `MAX_FUSED_ROWS` rows each has
programs of its own, and the one that arrives last reads all logits of the row and chooses: one launch. For
more rows a second launch chooses, with as many threads, so that the sums over experts have one order too. So
a row's bits depend on the row alone. A prompt's logits are one product of the library.

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
from compress.kernels.operands.routing import MAX_COUNTED_ROWS, RouterWeights
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.experts import Experts
from compress.models.moe import SUM_FLOOR

EXPERTS_PER_PROGRAM = 8
MAX_FUSED_ROWS = MAX_COUNTED_ROWS
ROWS_PER_PROGRAM = 4
"""Rows that one program takes where there are more than `MAX_FUSED_ROWS`: the weight is read less often."""
NUM_WARPS = 8
MAX_SIZE = 8192
"""Columns of a row that 8 warps keep in registers."""
SCORE_CODES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}


@jit()
def _choose(
    logits: tl.tensor,
    row: tl.tensor,
    selection_bias_ptr: tl.tensor,
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
    SELECTION_BIAS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Choose for one row, whose logits [E2] are -inf beyond E."""
    ids = tl.arange(0, E2)
    if SCORE == 0:
        most = tl.max(logits, axis=0)
        exponents = tl.exp(logits - most)
        total = tl.sum(exponents, axis=0)
        scores = exponents / total
    elif SCORE == 1:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = logits
    BY_LOGIT: tl.constexpr = SCORE == 0 and not SELECTION_BIAS and GROUPS == 1
    compared = logits if BY_LOGIT else scores
    if SELECTION_BIAS:
        compared += tl.load(selection_bias_ptr + ids, mask=ids < E, other=0.0)
    keys = _keys(compared, E2, E)
    if GROUPS > 1:
        by_group = tl.reshape(keys, [GROUPS, E2 // GROUPS])
        first = tl.max(by_group, axis=1)
        second = tl.max(tl.where(by_group == first[:, None], -(1 << 63), by_group), axis=1)
        worth = tl.where(second > -(1 << 63), _number(first) + _number(second), _number(first))
        worth_keys = _keys(worth, GROUPS, GROUPS)
        kept = worth_keys != worth_keys
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(worth_keys, axis=0)
            kept = kept | (worth_keys == best)
            worth_keys = tl.where(worth_keys == best, -(1 << 63), worth_keys)
        # A group that is out keeps its order below all that are in.
        keys = tl.reshape(tl.where(kept[:, None], by_group, -(1 << 63) + (by_group & 0xFFFFFFFF)), [E2])
    columns = tl.arange(0, K2)
    chosen = tl.zeros([K2], dtype=tl.int32)
    weights = tl.full([K2], float("-inf") if SCORE == 2 else 0.0, dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.max(keys, axis=0)
        expert = (E2 - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        if SELECTION_BIAS:
            score = tl.sum(tl.where(ids == expert, scores, 0.0), axis=0)
        else:
            score = _number(best)
        chosen = tl.where(columns == k, expert, chosen)
        weights = tl.where(columns == k, score, weights)
        keys = tl.where(ids == expert, -(1 << 63), keys)
    if BY_LOGIT:
        weights = tl.where(columns < K, tl.exp(weights - most) / total, 0.0)
    if SCORE == 2:
        exponents = tl.exp(weights - tl.max(weights, axis=0))
        weights = exponents / tl.sum(exponents, axis=0)
    elif RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + LEAST)
    tl.store(ids_ptr + row * K + columns, chosen, mask=columns < K)
    tl.store(weights_ptr + row * K + columns, weights * SCALE, mask=columns < K)


@jit()
def _keys(numbers: tl.tensor, SIZE: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Return int64 keys in the order of float32 numbers, of equal ones the lowest index largest; the least
    integer beyond COUNT."""
    index = tl.arange(0, SIZE)
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (SIZE - 1 - index).to(tl.int64)
    return tl.where(index < COUNT, keys, -(1 << 63))


@jit()
def _number(keys: tl.tensor) -> tl.tensor:
    """Return the float32 numbers of keys."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _route(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    selection_bias_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BIAS: tl.constexpr,
    E: tl.constexpr,
    E2: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(1)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, BLOCK)
    there = (experts < E)[:, None] & (columns < SIZE)[None, :]
    w = tl.load(weight_ptr + experts[:, None].to(tl.int64) * SIZE + columns[None, :], mask=there, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * SIZE + columns, mask=columns < SIZE, other=0.0)
    logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0)
    tl.store(logits_ptr + row * E2 + experts, logits, mask=experts < E)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + row, 0)
        tl.debug_barrier()
        every = tl.arange(0, E2)
        logits_of_row = tl.load(
            logits_ptr + row * E2 + every, mask=every < E, other=float("-inf"), cache_modifier=".cg"
        )
        _choose(
            logits_of_row, row, selection_bias_ptr, ids_ptr, weights_ptr, E, E2, K, K2, SCORE, RENORMALIZE,
            SCALE, GROUPS, TOP_GROUPS, SELECTION_BIAS, LEAST,
        )  # fmt: skip


@jit(varying=("num_rows",))
def _logits(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, BLOCK)
    there = (experts < E)[:, None] & (columns < SIZE)[None, :]
    w = tl.load(weight_ptr + experts[:, None].to(tl.int64) * SIZE + columns[None, :], mask=there, other=0.0)
    wait(PDL)
    for i in range(ROWS):
        row = tl.program_id(1) * ROWS + i
        mask = (columns < SIZE) & (row < num_rows)
        x = tl.load(x_ptr + row.to(tl.int64) * SIZE + columns, mask=mask, other=0.0)
        logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        tl.store(logits_ptr + row * E + experts, logits, mask=(experts < E) & (row < num_rows))


@jit()
def _choose_rows(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    selection_bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    BIAS: tl.constexpr,
    E: tl.constexpr,
    E2: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    every = tl.arange(0, E2)
    logits = tl.load(logits_ptr + row * E + every, mask=every < E, other=float("-inf"))
    if BIAS:
        logits += tl.load(bias_ptr + every, mask=every < E, other=0.0)
    _choose(
        logits, row, selection_bias_ptr, ids_ptr, weights_ptr, E, E2, K, K2, SCORE, RENORMALIZE,
        SCALE, GROUPS, TOP_GROUPS, SELECTION_BIAS, LEAST,
    )  # fmt: skip


def _outputs(x_TD: Tensor, facts: Experts) -> tuple[Tensor, Tensor]:
    shape = len(x_TD), facts.top_k
    return (
        torch.empty(shape, dtype=torch.int32, device=x_TD.device),
        torch.empty(shape, dtype=torch.float32, device=x_TD.device),
    )


def _constants(router: RouterWeights, facts: Experts) -> dict[str, Any]:
    return {
        "BIAS": router.bias_E is not None,
        "E": facts.num_experts,
        "E2": _power_of_two(facts.num_experts),
        "K": facts.top_k,
        "K2": _power_of_two(facts.top_k),
        "SCORE": SCORE_CODES[facts.score],
        "RENORMALIZE": facts.renormalize,
        "SCALE": facts.scale,
        "GROUPS": facts.num_groups,
        "TOP_GROUPS": facts.top_groups,
        "SELECTION_BIAS": facts.selection_bias,
        "LEAST": SUM_FLOOR if facts.score == "sigmoid" else 0.0,
    }


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 1).bit_length()


def _check(x_TD: Tensor, router: RouterWeights, facts: Experts) -> None:
    assert router.weight_ED.shape == (facts.num_experts, x_TD.shape[1])
    assert (router.selection_bias_E is not None) == facts.selection_bias
    assert facts.num_groups == 1 or _power_of_two(facts.num_experts) == facts.num_experts


def route(x_TD: Tensor, router: RouterWeights, facts: Experts) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K], of few rows."""
    _check(x_TD, router, facts)
    num_rows, size = x_TD.shape
    device = x_TD.device
    x_TD = x_TD.contiguous()
    programs = -(-facts.num_experts // EXPERTS_PER_PROGRAM)
    sizes = {"SIZE": size, "BLOCK": _power_of_two(size), "EXPERTS": EXPERTS_PER_PROGRAM}
    options = {"num_warps": NUM_WARPS, **pdl_options(device)}
    if num_rows > MAX_FUSED_ROWS or num_rows == 0:
        logits_TE = torch.empty(num_rows, facts.num_experts, dtype=torch.float32, device=device)
        _logits[programs, -(-num_rows // ROWS_PER_PROGRAM)](
            x_TD,
            router.weight_ED,
            logits_TE,
            num_rows,
            ROWS=ROWS_PER_PROGRAM,
            E=facts.num_experts,
            **sizes,
            **options,
        )
        return _chosen(logits_TE, router, facts, num_warps=NUM_WARPS)
    ids_TK, weights_TK = _outputs(x_TD, facts)
    constants = _constants(router, facts)
    _route[programs, num_rows](
        x_TD,
        router.weight_ED,
        router.bias_E,
        router.selection_bias_E,
        torch.empty(num_rows, constants["E2"], dtype=torch.float32, device=device),
        router.arrivals,
        ids_TK,
        weights_TK,
        **sizes,
        **constants,
        **options,
    )
    return ids_TK, weights_TK


def route_many(x_TD: Tensor, router: RouterWeights, facts: Experts) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K]; a row's bits may depend on the number of rows."""
    _check(x_TD, router, facts)
    if x_TD.dtype == torch.float32 or x_TD.device.type == "cpu":
        logits_TE = x_TD.float() @ router.weight_ED.float().t()
    else:
        logits_TE = torch.mm(x_TD, router.weight_ED.t(), out_dtype=torch.float32)
    return _chosen(logits_TE, router, facts, num_warps=1)


def _chosen(
    logits_TE: Tensor, router: RouterWeights, facts: Experts, *, num_warps: int
) -> tuple[Tensor, Tensor]:
    """Choose for each row of logits, to which the bias is yet to be added."""
    ids_TK, weights_TK = _outputs(logits_TE, facts)
    if len(logits_TE) > 0:
        _choose_rows[(len(logits_TE),)](
            logits_TE,
            router.bias_E,
            router.selection_bias_E,
            ids_TK,
            weights_TK,
            **_constants(router, facts),
            num_warps=num_warps,
            **pdl_options(logits_TE.device),
        )
    return ids_TK, weights_TK


def _refusal(problem: Problem) -> str | None:
    if refusal := triton_refusal(problem):
        return refusal
    if problem.row_invariant and problem.k > MAX_SIZE:
        return f"holds a row in registers, at most {MAX_SIZE} columns"
    if problem.expert_groups > 1 and _power_of_two(problem.experts) != problem.experts:
        return f"limits groups of experts whose number is a power of two, not {problem.experts}"
    return None


def _few(problem: Problem) -> str | None:
    if not problem.row_invariant:
        return "for decode rows; a prompt's logits are one product"
    return _refusal(problem)


def _many(problem: Problem) -> str | None:
    return "a row's bits depend on the number of rows" if problem.row_invariant else _refusal(problem)


register(Kernel("router", "triton.row", min_sm=80, priority=10, supports=_few, fn=route))
register(Kernel("router", "triton.product", min_sm=80, priority=10, supports=_many, fn=route_many))
