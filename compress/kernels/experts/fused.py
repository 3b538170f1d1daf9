"""Triton experts of prompts, and of decode rows that neither `slices.py` nor `resident.py` serves: the tiles
of their products, and what they refuse.

Tiles change no bit of a decode row, so they follow the number of rows. Sizes were chosen by measurement
(`scripts/bench_experts.py`).
"""

from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.experts.launch import MAX_DECODE_ROWS, MAX_PAIRED_ROWS, Plan, run
from compress.kernels.experts.packed import (
    DECODED_IN_SLICES,
    PackedExperts,
    format_of_problem,
    refusal,
    repack,
)
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.operands.matrices import Matrices
from compress.kernels.operands.matrix_product import MIN_NATIVE_COLUMNS, Tile
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def decode_plan(packed: PackedExperts, num_rows: int) -> Plan:
    """Return how decode rows run."""
    few = num_rows <= MAX_PAIRED_ROWS
    bn = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    bm, warps, stages = (64, 4, 3) if few and num_rows > 2 else (32, 2, 4)
    return Plan(
        Tile(bm, bn, packed.gate_up.step_columns(128), warps, stages),
        Tile(bm, bn, packed.down.step_columns(128), warps, stages),
        sort=not few,
        combine=few,
        y_dtype=torch.float32,
        prefetch=packed.format != "dense16" and num_rows == 1,
    )


def prefill_plan(packed: PackedExperts, num_rows: int, top_k: int) -> Plan:
    """Return how the rows of a prompt run."""
    many = num_rows * top_k > 48 * packed.num_experts
    gate_up = down = (64, 64 if many else 32, 4, 3)
    if packed.format == "dense16":
        gate_up = (64, 128 if many else 64, 8, 3)
        down = (128, gate_up[1], 8, 3)
    elif packed.format in ("fp8", "int8"):
        gate_up = down = (64, 128 if many else 32, 4, 3)
    elif packed.format == "fp8_block":
        gate_up = down = (128, 32, 4, 3)
    most = 64 if packed.format in ("dense16", "w8") else 128

    def tile(sizes: tuple[int, int, int, int], matrices: Matrices) -> Tile:
        bm, bn, warps, stages = sizes
        return Tile(bm, bn, matrices.step_columns(most), warps, stages)

    first = tile(gate_up if packed.gated else down, packed.gate_up)
    second = tile(down, packed.down)
    narrowest = min(first.bk, second.bk)
    return Plan(
        first,
        second,
        sort=True,
        combine=False,
        y_dtype=packed.dtype,
        native_fp8=narrowest >= MIN_NATIVE_COLUMNS,
    )


def decode(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return [T, D]; a row's bits depend on the row alone."""
    plan = decode_plan(packed, len(ids_TK))
    return run(
        x_TD, packed, ids_TK, weights_TK, plan, activation=activation, cap=cap, residual_TD=residual_TD
    )


def prefill(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return [T, D] of many rows."""
    plan = prefill_plan(packed, *ids_TK.shape)
    return run(
        x_TD, packed, ids_TK, weights_TK, plan, activation=activation, cap=cap, residual_TD=residual_TD
    )


def _supports(problem: Problem, *, activation: str, few_rows: bool) -> str | None:
    if problem.activation != activation:
        return f"for experts of the activation {activation}"
    if few_rows != problem.row_invariant:
        return "for decode rows" if few_rows else "a row's bits depend on the number of rows"
    if few_rows and problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}, where weight bytes are the bound"
    if few_rows and format_of_problem(problem) in DECODED_IN_SLICES:
        return "weights of four bits, and of int8, have a kernel of their own"
    return triton_refusal(problem) or refusal(problem)


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
