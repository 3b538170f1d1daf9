"""Which tiles the grouped products take, and the kernels that they serve: decode rows, and prompts.

Tiles change no bit of a decode row, so they follow the number of rows. Sizes were chosen by measurement
(`scripts/bench_experts.py`).
"""

from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.experts.grouped import Plan, Tile, native_fp8, run
from compress.kernels.experts.packed import BLOCK, TILE, PackedExperts, format_of, repack
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES

MAX_PAIRED_ROWS = 4
"""Rows up to which every pair is a unit: few experts are hit twice, and L2 serves the second."""
MAX_COMBINED_ROWS = 16
"""Rows up to which the last program of an output tile combines: one program reads K numbers of each row."""
MAX_DECODE_ROWS = 512
MIN_COLUMNS = 16


def decode_plan(packed: PackedExperts, num_rows: int) -> Plan:
    """Return how decode rows run."""
    bn = 8 if num_rows <= 16 else 16 if num_rows <= 128 else 32
    bm, warps, stages = {"w4": (64, 4, 3), "dense16": (32, 2, 4)}.get(packed.format, (32, 2, 4))
    gate_up = Tile(bm, bn, columns(packed, packed.gate_up.in_features), warps, stages)
    down = Tile(bm, bn, columns(packed, packed.down.in_features), warps, stages)
    return Plan(
        gate_up,
        down,
        sort=num_rows > MAX_PAIRED_ROWS,
        combine=num_rows <= MAX_COMBINED_ROWS,
        native_fp8=False,
        y_dtype=torch.float32,
    )


def prefill_plan(packed: PackedExperts, num_rows: int) -> Plan:
    """Return how the rows of a prompt run."""
    pairs_per_expert = num_rows * 8 // packed.num_experts
    bn = 128 if pairs_per_expert > 96 else 64 if pairs_per_expert > 24 else 32
    most = 64 if packed.format == "dense16" else 128
    gate_up = Tile(64, bn, columns(packed, packed.gate_up.in_features, most), 8, 3)
    down = Tile(128, bn, columns(packed, packed.down.in_features, most), 8, 3)
    return Plan(
        gate_up,
        down,
        sort=True,
        combine=False,
        native_fp8=native_fp8(packed.down.data.device),
        y_dtype=packed.dtype,
    )


def columns(packed: PackedExperts, size: int, most: int = 2 * BLOCK) -> int:
    """Return the columns of a step: at most `most`, and a divisor of `size`."""
    if packed.format == "w4":
        return 2 * BLOCK if most > BLOCK and size % (2 * BLOCK) == 0 else BLOCK
    if packed.format == "fp8_block":
        return BLOCK
    return next(step for step in (128, 64, 32, 16) if step <= most and size % step == 0)


def decode(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return [T, D]; a row's bits depend on the row alone."""
    plan = decode_plan(packed, len(ids_TK))
    return run(x_TD, packed, ids_TK, weights_TK, plan, activation=activation, residual_TD=residual_TD)


def prefill(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return [T, D] of many rows."""
    plan = prefill_plan(packed, len(ids_TK))
    return run(x_TD, packed, ids_TK, weights_TK, plan, activation=activation, residual_TD=residual_TD)


def refusal(problem: Problem) -> str | None:
    """Refuse what no grouped kernel serves."""
    if reason := triton_refusal(problem):
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {problem.dtype}"
    given = None
    if problem.scheme in SCHEMES:
        given = format_of(SCHEMES[problem.scheme])
    elif problem.scheme == DENSE_SCHEMES[problem.dtype]:
        given = "dense16"
    if given is None:
        return "for weights of 16 bits, of 4 bits, and of e4m3 with dynamic input scales"
    for name, size in (("D", problem.n), ("F", problem.k)):
        multiple = BLOCK if given in ("w4", "fp8_block") else 32 if given == "fp8" else MIN_COLUMNS
        if size % multiple:
            return f"{name} = {size} is no multiple of {multiple}"
    return None


def _supports(problem: Problem, *, activation: str, few_rows: bool) -> str | None:
    if problem.activation != activation:
        return f"its experts are gated by {activation}"
    if few_rows != problem.row_invariant:
        return "for decode rows" if few_rows else "a row's bits depend on the number of rows"
    if few_rows and problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}, where weight bytes are the bound"
    return refusal(problem)


assert TILE <= MIN_COLUMNS
for _activation in ACTIVATIONS:
    for _name, _fn, _few in (("decode", decode, True), ("prefill", prefill, False)):
        register(
            Kernel(
                "experts",
                f"triton.{_name}.{_activation}",
                min_sm=80,
                priority=10,
                supports=partial(_supports, activation=_activation, few_rows=_few),
                fn=partial(_fn, activation=_activation),
                repack_experts=repack,
            )
        )
