"""Experts of decode rows with weights of four bits, and of int8, by products in slices
(`operands/slices.cu`): gate and up with their activation, down, and the sum over the choices of a token.

Up to a few rows (two of many choices) every pair is a unit of its own (few experts are hit twice, and L2
serves the second), and a block has warps for each choice of a token, whose outputs it adds; more pairs are
sorted by expert. y is
float32 and added in the order of K, so a row has the same bits in any company.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.experts.launch import MAX_DECODE_ROWS, MAX_PAIRED_ROWS, add_choices, operand_of
from compress.kernels.experts.packed import (
    DECODED_IN_SLICES,
    PackedExperts,
    format_of_problem,
    refusal,
    repack,
)
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.experts.units import sort_pairs
from compress.kernels.operands.gpu import Gpu, gpu_of
from compress.kernels.operands.matrices import IN_WORDS, Matrices
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.operands.slices import (
    SLICES,
    STATIC_BYTES,
    Chosen,
    Sum,
    Tile,
    multiply,
    steps_of,
    variant_of,
)
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

FEW_CHOICES = 16
MAX_PAIRED_ROWS_OF_MANY = 2
"""Rows of more than `FEW_CHOICES` whose pairs are units of their own."""
DOWN_OF_MANY = Tile(1, 1, 2, 1, 1, staged=True)
"""The tile of down with a warp for each of many choices."""
FEW_ROWS = 32
MOST_WARPS = 32
"""Warps of a block."""


def is_paired(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> bool:
    """Return whether every pair is a unit of its own."""
    if top_k <= FEW_CHOICES:
        return num_rows <= MAX_PAIRED_ROWS
    if num_rows > MAX_PAIRED_ROWS_OF_MANY or top_k > MOST_WARPS:
        return False
    return shared_bytes(packed, DOWN_OF_MANY, top_k) <= gpu.shared_bytes - STATIC_BYTES


def tiles_of(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> tuple[Tile, Tile]:
    """Return the tiles of gate and up, and of down. They change no bit; sizes were chosen by measurement
    (`scripts/bench_experts.py`, and the steps of whole models) of experts with gates. Without, an item of up
    has as many tiles where rows are few, of which more blocks fit, and those of both where they are many."""
    gate_up, down = _gated_tiles(packed, num_rows, top_k, gpu)
    if packed.gated or is_paired(packed, num_rows, top_k, gpu):
        return gate_up, down
    if num_rows <= FEW_ROWS:
        return replace(gate_up, blocks=gate_up.blocks + 1), down
    return replace(gate_up, output_tiles=2 * gate_up.output_tiles), down


def _gated_tiles(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> tuple[Tile, Tile]:
    if is_paired(packed, num_rows, top_k, gpu):
        items = -(-packed.gate_up.out_features // 32) * num_rows * top_k
        gate = _paired_gate(items / gpu.num_sms if packed.format in IN_WORDS else 0)
        room = gpu.shared_bytes - STATIC_BYTES
        downs = _paired_downs(packed.down, num_rows, top_k, gpu.num_sms)
        return gate, next(each for each in downs if shared_bytes(packed, each, top_k) <= room)
    if num_rows <= FEW_ROWS:
        return Tile(2, 1, 1, 4, 1), Tile(2, 1, 1, 5, 1)
    if num_rows <= 64:
        return Tile(1, 1, 1, 6, 1), Tile(2, 1, 1, 6, 1)
    row_tiles = 2 if num_rows <= 256 else 4
    return Tile(1, row_tiles, 1, 3, 1), Tile(2, row_tiles, 1, 3, 1)


def _paired_gate(items: float) -> Tile:
    """Return the tile of gate and up where a multiprocessor has so many items of 16 outputs; with few, all
    are there at once."""
    if items <= 3:
        return Tile(1, 1, 1, 3, 8)
    if items <= 8:
        return Tile(2, 1, 2, 2, 4, staged=True)
    return Tile(2, 1, 1, 3, 2, staged=True) if items <= 16 else Tile(2, 1, 2, 3, 1, staged=True)


def _paired_downs(down: Matrices, num_rows: int, top_k: int, num_sms: int) -> Iterator[Tile]:
    """Yield tiles of down, a block of which has the choices of a token, the best first; the last one needs
    next to no shared memory."""
    if top_k > FEW_CHOICES:
        yield DOWN_OF_MANY
        return
    long = steps_of(down) > SLICES
    if num_rows > 2 or (num_rows == 2 and long and top_k > 4):
        yield Tile(2, 1, 2, 2, 1, staged=True)
    elif num_rows == 1 and 4 * top_k <= MOST_WARPS:
        if long and top_k <= 4:
            yield Tile(2, 1, 2, 1, 4, staged=True)
        elif long and down.out_features > 16 * num_sms:  # blocks of one tile each are not there at once
            yield Tile(2, 1, 2, 1, 2, staged=True)
        else:
            yield Tile(1, 1, 1, 1, 4)
    yield Tile(1, 1, 6 if long or num_rows == 1 else 3, 1, 1, staged=True)
    yield Tile(1, 1, 1, 2, 1)


def shared_bytes(packed: PackedExperts, tile: Tile, top_k: int) -> int:
    """Return the bytes of shared memory of down where every pair is a unit of its own."""
    variant = variant_of(
        packed.down,
        tile,
        dtype=packed.dtype,
        activation=None,
        out_dtype=packed.dtype,
        rows="by pair",
        choices=top_k,
    )
    return variant.shared_bytes(steps_of(packed.down))


def decode(
    x_TD: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
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
        x_values, x_scale, packed.gate_up, h_PF, first, activation=activation, bias=bias, rows="chosen"
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
