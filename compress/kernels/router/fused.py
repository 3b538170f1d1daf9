"""Router of few or many rows: logits, scores, the choice and its weights, in one launch for few rows.

A program computes the logits of `EXPERTS_PER_PROGRAM` experts, row after row, by sums over whole rows of the
router weight in float32, in an order that follows from D alone. Of up to `MAX_FUSED_ROWS` rows each has
programs of its own, and the one that arrives last reads all logits of the row and chooses: one launch. For
more rows a second launch chooses, with as many threads, so that the sums over experts have one order too. So
a row's bits depend on the row alone. A prompt's logits are one product of the library.

Decode rows may come raw, before their norm: each program norms the row that it reads, and one more program
writes it for the experts, quantized as they read it.

An expert's place is the number of larger keys; a key is the compared number as an integer of the same order,
then the id, so that of equal numbers the lowest id is first.

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
from compress.kernels.operands.rows import QuantizedRows, RawRows
from compress.kernels.problem import Problem
from compress.kernels.quantize_rows.fused import row_output, store_row
from compress.kernels.rms_norm.fused import aligned, normed_row
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
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
    chosen = rank < K
    if SCORE == 2:
        exponents = tl.where(chosen, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
        weights = exponents / tl.sum(exponents, axis=0)
    elif RENORMALIZE:
        weights = scores / (tl.sum(tl.where(chosen, scores, 0.0), axis=0) + LEAST)
    else:
        weights = scores
    tl.store(ids_ptr + row * K + rank, ids, mask=chosen)
    tl.store(weights_ptr + row * K + rank, weights * SCALE, mask=chosen)


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
def _row(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    row: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Return a row [BLOCK], normed if it comes raw."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * SIZE + columns, mask=columns < SIZE, other=0.0)
    if NORM:
        x = normed_row(x, tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0), eps, SIZE, False)
    return x


@jit()
def _route(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
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
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(1)
    WRITERS: tl.constexpr = 1 if NORM else 0
    if NORM and tl.program_id(0) == tl.num_programs(0) - 1:
        wait(PDL)
        x = _row(x_ptr, norm_ptr, eps, row, SIZE, BLOCK, NORM)
        store_row(x, row, out_ptr, scale_ptr, static_ptr, SIZE, BLOCK, QUANT, GROUP, CONVERTS)
        return
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, BLOCK)
    there = (experts < E)[:, None] & (columns < SIZE)[None, :]
    w = tl.load(weight_ptr + experts[:, None].to(tl.int64) * SIZE + columns[None, :], mask=there, other=0.0)
    wait(PDL)
    x = _row(x_ptr, norm_ptr, eps, row, SIZE, BLOCK, NORM)
    logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0)
    tl.store(logits_ptr + row * E2 + experts, logits, mask=experts < E)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1 - WRITERS:
        tl.store(arrivals_ptr + row, 0)
        tl.debug_barrier()
        every = tl.arange(0, E2)
        logits_of_row = tl.load(
            logits_ptr + row * E2 + every, mask=every < E, other=float("-inf"), cache_modifier=".cg"
        )
        _choose(
            logits_of_row, row, selection_bias_ptr, ids_ptr, weights_ptr, E, E2, K, SCORE, RENORMALIZE,
            SCALE, GROUPS, TOP_GROUPS, SELECTION_BIAS, LEAST,
        )  # fmt: skip


@jit(varying=("num_rows",))
def _logits(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    if NORM and tl.program_id(0) == tl.num_programs(0) - 1:
        wait(PDL)
        for i in range(ROWS):
            row = tl.program_id(1) * ROWS + i
            if row < num_rows:
                x = _row(x_ptr, norm_ptr, eps, row, SIZE, BLOCK, NORM)
                store_row(x, row, out_ptr, scale_ptr, static_ptr, SIZE, BLOCK, QUANT, GROUP, CONVERTS)
        return
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, BLOCK)
    there = (experts < E)[:, None] & (columns < SIZE)[None, :]
    w = tl.load(weight_ptr + experts[:, None].to(tl.int64) * SIZE + columns[None, :], mask=there, other=0.0)
    wait(PDL)
    for i in range(ROWS):
        row = tl.program_id(1) * ROWS + i
        x = _row(x_ptr, norm_ptr, eps, tl.minimum(row, num_rows - 1), SIZE, BLOCK, NORM)
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
        logits, row, selection_bias_ptr, ids_ptr, weights_ptr, E, E2, K, SCORE, RENORMALIZE,
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


def route(
    x: Tensor | RawRows, router: RouterWeights, facts: Experts
) -> tuple[Tensor | QuantizedRows, Tensor, Tensor]:
    """Return the rows that experts read, and ids and weights, [T, K], of few rows."""
    raw = x if isinstance(x, RawRows) else None
    x_TD = aligned(x.x_TK if isinstance(x, RawRows) else x)
    _check(x_TD, router, facts)
    num_rows, size = x_TD.shape
    device = x_TD.device
    rows: Tensor | QuantizedRows = x_TD
    output: dict[str, Any] = dict.fromkeys(("out_ptr", "scale_ptr", "static_ptr"))
    output |= {"QUANT": 0, "GROUP": 0, "CONVERTS": False}
    if raw is not None:
        rows, output = row_output(num_rows, size, x_TD.dtype, device, raw.quant)
    normed = {
        "norm_ptr": None if raw is None else raw.weight_K,
        "eps": 0.0 if raw is None else raw.eps,
        "NORM": raw is not None,
        **output,
    }
    programs = -(-facts.num_experts // EXPERTS_PER_PROGRAM) + (raw is not None)
    sizes = {"SIZE": size, "BLOCK": _power_of_two(size), "EXPERTS": EXPERTS_PER_PROGRAM}
    options = {"num_warps": NUM_WARPS, **pdl_options(device)}
    if num_rows > MAX_FUSED_ROWS or num_rows == 0:
        logits_TE = torch.empty(num_rows, facts.num_experts, dtype=torch.float32, device=device)
        _logits[programs, -(-num_rows // ROWS_PER_PROGRAM)](
            x_TD,
            weight_ptr=router.weight_ED,
            logits_ptr=logits_TE,
            num_rows=num_rows,
            ROWS=ROWS_PER_PROGRAM,
            E=facts.num_experts,
            **normed,
            **sizes,
            **options,
        )
        return rows, *_chosen(logits_TE, router, facts, num_warps=NUM_WARPS)
    ids_TK, weights_TK = _outputs(x_TD, facts)
    constants = _constants(router, facts)
    _route[programs, num_rows](
        x_TD,
        weight_ptr=router.weight_ED,
        bias_ptr=router.bias_E,
        selection_bias_ptr=router.selection_bias_E,
        logits_ptr=torch.empty(num_rows, constants["E2"], dtype=torch.float32, device=device),
        arrivals_ptr=router.arrivals,
        ids_ptr=ids_TK,
        weights_ptr=weights_TK,
        **normed,
        **sizes,
        **constants,
        **options,
    )
    return rows, ids_TK, weights_TK


def route_many(x_TD: Tensor, router: RouterWeights, facts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, and ids and weights, [T, K]; a row's bits may depend on the number of rows."""
    _check(x_TD, router, facts)
    if x_TD.dtype == torch.float32 or x_TD.device.type == "cpu":
        logits_TE = x_TD.float() @ router.weight_ED.float().t()
    else:
        logits_TE = torch.mm(x_TD, router.weight_ED.t(), out_dtype=torch.float32)
    return x_TD, *_chosen(logits_TE, router, facts, num_warps=1)


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


register(Kernel("router", "triton.row", min_sm=80, priority=10, supports=_few, fn=route, prepares=True))
register(Kernel("router", "triton.product", min_sm=80, priority=10, supports=_many, fn=route_many))
