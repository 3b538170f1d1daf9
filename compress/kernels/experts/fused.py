"""Triton experts of the rows of prompts: pairs sorted by expert, rows rounded, gate and up, down, sum.

Sizes of tiles were chosen by measurement (`scripts/bench_experts.py`).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.triton import interpreted, pdl_options, triton_refusal
from compress.kernels.experts.grouped import down, gate_up
from compress.kernels.experts.launch import add_choices, operand
from compress.kernels.experts.packed import PackedExperts, refusal, repack
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.experts.units import sort_pairs
from compress.kernels.operands.matrices import FORMATS, Matrices
from compress.kernels.operands.matrix_product import e4m3_factors
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

MIN_NATIVE_COLUMNS = 32
"""Columns of a step on tensor cores that multiply e4m3."""


@dataclass(frozen=True)
class Tile:
    """The outputs, tokens and columns of a program's product, its warps, and the stages of its pipeline."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int


def tiles_of(packed: PackedExperts, num_rows: int, top_k: int) -> tuple[Tile, Tile]:
    """Return the tiles of gate and up, and of down."""
    many = num_rows * top_k > 48 * packed.num_experts
    gate_up = down = (64, 64 if many else 32, 4, 3)
    if packed.format == "dense16":
        gate_up = (64, 128 if many else 64, 8, 3)
        down = (128, gate_up[1], 8, 3)
    elif packed.format == "fp8":
        gate_up = down = (64, 128 if many else 32, 4, 3)
    elif packed.format == "fp8_block":
        gate_up = down = (128, 32, 4, 3)
    most = 64 if packed.format == "dense16" else 128

    def tile(sizes: tuple[int, int, int, int], matrices: Matrices) -> Tile:
        bm, bn, warps, stages = sizes
        return Tile(bm, bn, matrices.step_columns(most), warps, stages)

    return tile(gate_up, packed.gate_up), tile(down, packed.down)


def prefill(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Return [T, D]. `tiles` are for measuring others than those chosen."""
    num_rows, top_k = ids_TK.shape
    device = ids_TK.device
    hidden = packed.down.out_features
    ffn = packed.down.in_features
    num_pairs = num_rows * top_k
    out_TD = torch.empty(num_rows, hidden, dtype=packed.dtype, device=device)
    if num_rows == 0:
        return out_TD
    first, second = tiles or tiles_of(packed, num_rows, top_k)
    assert first.bn == second.bn, "both products have the same units"
    h_PF = torch.empty(num_pairs, ffn, dtype=packed.dtype, device=device)
    y_PD = torch.empty(num_pairs, hidden, dtype=packed.dtype, device=device)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    x_values, x_scale = operand(x_TD, packed)
    units = sort_pairs(ids_TK, packed.num_experts, first.bn)
    native = min(first.bk, second.bk) >= MIN_NATIVE_COLUMNS
    common = {
        "D": hidden,
        "F": ffn,
        "FORMAT": FORMATS.index(packed.format),
        "E4M3": e4m3_factors(device, native=native),
        "INTERPRETED": interpreted(),
        **pdl_options(device),
    }

    def grid(size: int, tile: Tile) -> tuple[int, int]:
        return -(-size // tile.bm), units.experts.numel()

    gate_up[grid(ffn, first)](
        x_values,
        x_scale,
        units.experts,
        units.pairs,
        *_operands(packed.gate_up),
        h_PF,
        **_constants(packed.gate_up, first),
        K=top_k,
        ACTIVATION=activation,
        **common,
    )
    h_values, h_scale = operand(h_PF, packed)
    down[grid(hidden, second)](
        h_values,
        h_scale,
        units.experts,
        units.pairs,
        *_operands(packed.down),
        y_PD,
        **_constants(packed.down, second),
        **common,
    )
    add_choices(y_PD, weights_TK, residual_TD, out_TD)
    return out_TD


def _operands(matrices: Matrices) -> tuple[Tensor | None, ...]:
    return matrices.data, matrices.scale, matrices.offset, matrices.bias_EO


def _constants(matrices: Matrices, tile: Tile) -> dict[str, int | bool]:
    scale = matrices.scale
    return {
        "BLOCKS": scale.shape[1] if scale is not None else 0,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": matrices.group_size,
        "ASYMMETRIC": matrices.offset is not None,
        "BIAS": matrices.bias_EO is not None,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def _supports(problem: Problem, *, activation: str) -> str | None:
    if problem.activation != activation:
        return f"its experts are gated by {activation}"
    if problem.row_invariant:
        return "a row's bits depend on the number of rows"
    return triton_refusal(problem) or refusal(problem)


for _activation in ACTIVATIONS:
    register(
        Kernel(
            "experts",
            f"triton.prefill.{_activation}",
            min_sm=80,
            priority=10,
            supports=partial(_supports, activation=_activation),
            fn=partial(prefill, activation=_activation),
            repack_experts=repack,
        )
    )
