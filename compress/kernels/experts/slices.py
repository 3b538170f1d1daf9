"""Experts of decode rows with weights of four bits, and of int8, by products in slices
(`operands/slices.cu`): gate and up with their activation, down, and the sum over the choices of a token.

Up to a few rows (two of many choices) every pair is a unit of its own (few experts are hit twice, and L2
serves the second), and a block has warps for each choice of a token, whose outputs it adds; more pairs are
sorted by expert. y is float32 and added in the order of K, so a row has the same bits in any company.
"""

from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.experts.launch import MAX_DECODE_ROWS, add_choices, operand_of
from compress.kernels.experts.packed import (
    DECODED_IN_SLICES,
    PackedExperts,
    format_of_problem,
    refusal,
    repack,
)
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.experts.slice_tiles import is_paired, tiles_of
from compress.kernels.experts.units import sort_pairs
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.operands.slices import Chosen, Sum, Tile, multiply
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def decode(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
    cap: float | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Return [T, D]; a row's bits depend on the row alone. `tiles` are for measuring others than those
    chosen."""
    num_rows, top_k = ids_TK.shape
    device = ids_TK.device
    hidden = packed.down.out_features
    out_TD = torch.empty(num_rows, hidden, dtype=packed.dtype, device=device)
    if num_rows == 0:
        return out_TD
    assert ids_TK.is_contiguous()
    assert weights_TK.is_contiguous()
    gpu = gpu_of(device)
    first, second = tiles or tiles_of(packed, num_rows, top_k, gpu)
    assert first.row_tiles == second.row_tiles, "both products have the same units"
    h_PF = torch.empty(num_rows * top_k, packed.down.in_features, dtype=packed.dtype, device=device)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    paired = is_paired(packed, num_rows, top_k, gpu)
    chosen = Chosen(ids_TK, None, top_k)
    if not paired:
        units = sort_pairs(ids_TK, packed.num_experts, 8 * first.row_tiles)
        chosen = Chosen(units.experts, units.pairs, top_k)
    multiply_units = partial(multiply, dtype=packed.dtype, num_rows=num_rows, chosen=chosen)
    bias = packed.gate_up.bias_EO
    x_values, x_scale = operand_of(x_TD, packed.gate_up_input, packed)
    multiply_units(
        x_values,
        x_scale,
        packed.gate_up,
        h_PF,
        first,
        activation=activation,
        cap=cap,
        bias=bias,
        rows="chosen",
    )
    h_values, h_scale = operand_of(h_PF, packed.down_input, packed)
    multiply_down = partial(
        multiply_units, h_values, h_scale, packed.down, bias=packed.down.bias_EO, rows="by pair"
    )
    if paired:
        multiply_down(y=out_TD, tile=second, total=Sum(weights_TK, residual_TD))
    else:
        y_PD = torch.empty(num_rows * top_k, hidden, dtype=torch.float32, device=device)
        multiply_down(y=y_PD, tile=second)
        add_choices(y_PD, weights_TK, residual_TD, out_TD)
    return out_TD


def _supports(problem: Problem, *, activation: str) -> str | None:
    if problem.activation != activation:
        return f"for experts of the activation {activation}"
    if not problem.row_invariant:
        return "for decode rows"
    if problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}, where weight bytes are the bound"
    if format_of_problem(problem) not in DECODED_IN_SLICES:
        return "for weights of four bits, and of int8"
    return triton_refusal(problem) or refusal(problem)


for _activation in ACTIVATIONS:
    register(
        Kernel(
            "experts",
            f"cuda.slices.{_activation}",
            min_sm=80,
            priority=10,
            supports=partial(_supports, activation=_activation),
            fn=partial(decode, activation=_activation),
            repack_experts=repack,
        )
    )
