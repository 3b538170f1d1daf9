"""The loops over columns on a GPU: a block in one launch, in which a program computes all columns of a few
outputs.

The program keeps the errors (or the changes) of the columns so far in registers, and sums over them in
another order than torch, so last bits differ from `reference.py`. H and U may have any strides: some
libraries return transposed factors.

Shapes: B columns of a block, O outputs.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.columns.block import DescentBlock
from compress.kernels.compilers.triton import jit, tl, triton
from compress.quant.scheme import Scheme

OUTPUTS = 64
"""Outputs of a program that rounds: with 128 columns and four warps a thread holds 64 numbers in
registers."""
WARPS = 4
DESCENT_OUTPUTS = 32
"""Outputs of a program that descends, one warp."""
DESCENT_COLUMNS = 16
"""Columns that a warp holds in registers at a time: a step sums over few lanes and needs no barrier."""


def launch_round(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `round_block` as one launch."""
    size, num_outputs = w_BO.shape
    codes_BO = torch.empty_like(w_BO)
    errors_BO = torch.empty_like(w_BO)
    _round[(triton.cdiv(num_outputs, OUTPUTS),)](
        *(w_BO, factor_BB, scale_BO, zero_BO, codes_BO, errors_BO, *factor_BB.stride(), size, num_outputs),
        BLOCK=triton.next_power_of_2(size),
        OUTPUTS=OUTPUTS,
        num_warps=WARPS,
        **_constants(scheme),
    )
    return codes_BO, errors_BO


def launch_descend(
    block: DescentBlock,
    *,
    curvature_product_BO: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `descend_block` as one launch."""
    size, num_outputs = block.levels_BO.shape
    new_BO = torch.empty_like(block.levels_BO)
    moves_BO = torch.empty_like(block.levels_BO)
    best_O = torch.empty_like(block.scale_O)
    _descend_group[(triton.cdiv(num_outputs, DESCENT_OUTPUTS),)](
        *(
            block.levels_BO,
            block.gradient_BO,
            curvature_product_BO,
            block.h_BB,
            block.inv_diag_B,
            block.scale_O,
            block.zero_O,
            new_BO,
            moves_BO,
            best_O,
            *block.h_BB.stride(),
            size,
            num_outputs,
        ),
        COLUMNS=DESCENT_COLUMNS,
        OUTPUTS=DESCENT_OUTPUTS,
        STORED=_STORED[scale_dtype] + _GRID[block.scheme.scale_type],
        num_warps=1,
        **_constants(block.scheme),
    )
    return new_BO, best_O, moves_BO


_STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The number by which the kernel is given the dtype of stored scales."""
_GRID = {None: 0, "e4m3": 3, "e8m0": 6}
"""The number that is added to it for scales of one byte."""
_FLOAT = {4: 2, 8: 1}
"""The number by which the kernel is given the type of float codes, by their bits; integers are 0."""


def _constants(scheme: Scheme) -> dict[str, Any]:
    """Return the range and type of the codes; no fused multiply-add, so that products round to float32 as in
    the reference."""
    return {
        "LOWEST": scheme.min_code,
        "HIGHEST": scheme.max_code,
        "FLOAT": _FLOAT[scheme.num_bits] if scheme.type == "float" else 0,
        "enable_fp_fusion": False,
    }


@jit()
def _nearest(
    x: tl.tensor, zero: tl.tensor, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FLOAT: tl.constexpr
) -> tl.tensor:
    """Return the code nearest to x, ties to even, as float32.

    Adding and subtracting 1.5 * 2^23, whose last bit is worth 1, rounds to an integer; an x too large for
    that saturates anyway.
    """
    if FLOAT:
        x = tl.minimum(tl.maximum(x, LOWEST), HIGHEST)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        if FLOAT == 1:
            step = tl.maximum(power * 0.125, 0.001953125)  # e4m3: three bits of mantissa, at least 2^-9
        else:
            step = tl.maximum(power * 0.5, 0.5)  # e2m1
        return (x / step + 12582912.0 - 12582912.0) * step
    return tl.minimum(tl.maximum(x + 12582912.0 - 12582912.0 + zero, LOWEST), HIGHEST)


@jit()
def _round(
    w_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    errors_ptr: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    size: tl.tensor,
    num_outputs: tl.tensor,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    FLOAT: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = outputs < num_outputs
    before = tl.arange(0, BLOCK)
    errors = tl.zeros((BLOCK, OUTPUTS), tl.float32)
    for i in range(size):
        at = i * num_outputs + outputs
        factor = tl.load(factor_ptr + before * row_stride + i * column_stride, mask=before < i, other=0.0)
        w = tl.load(w_ptr + at, mask=mask, other=0.0) - tl.sum(factor[:, None] * errors, axis=0)
        scale = tl.load(scale_ptr + at, mask=mask, other=1.0)
        zero = tl.zeros_like(w) if zero_ptr is None else tl.load(zero_ptr + at, mask=mask, other=0.0)
        code = _nearest(tl.div_rn(w, scale), zero, LOWEST, HIGHEST, FLOAT)
        pivot = tl.load(factor_ptr + i * (row_stride + column_stride))
        error = tl.div_rn(w - (code - zero) * scale, pivot + tl.zeros_like(w))
        tl.store(codes_ptr + at, code, mask=mask)
        tl.store(errors_ptr + at, error, mask=mask)
        errors = tl.where((before == i)[:, None], error[None, :], errors)


@jit()
def _stored(scale: tl.tensor, STORED: tl.constexpr, FLOAT: tl.constexpr) -> tl.tensor:
    """Return what `quant.numerics.storable` does, for the dtype and the grid that `STORED` numbers."""
    if STORED == 0:
        return scale
    if STORED == 1:
        return scale.to(tl.float16).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True)
    if STORED >= 3:
        if STORED >= 6:
            bits = (bits + 0x400000) & -0x800000
        else:
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        on_grid = bits.to(tl.float32, bitcast=True)
        return on_grid.to(tl.float16).to(tl.float32) if STORED % 3 == 1 else on_grid
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    stored = bits.to(tl.float32, bitcast=True)
    if FLOAT:
        return stored
    both = stored.to(tl.float16).to(tl.float32)
    least = tl.where(stored > 0, 2.0**-24, -(2.0**-24))
    both = tl.where((both == 0) & (stored != 0), least, both)
    return tl.where(tl.abs(stored) < 2.0**-17, both, stored)


@jit()
def _descend_group(
    levels_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    curvature_product_ptr: tl.tensor,
    h_ptr: tl.tensor,
    inv_diag_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    new_ptr: tl.tensor,
    moves_ptr: tl.tensor,
    best_ptr: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    size: tl.tensor,
    num_outputs: tl.tensor,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STORED: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    FLOAT: tl.constexpr,
) -> None:
    """Refit the scales of a block if `curvature_product_ptr` is given, then descend its columns, a few at a
    time in registers.

    A few columns first add the changes of all columns before them to their gradients, in one go: no store
    comes in between that a load would have to wait for.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = outputs < num_outputs
    columns = tl.arange(0, COLUMNS)
    old_scale = tl.load(scale_ptr + outputs, mask=mask, other=1.0)
    zero = tl.zeros_like(old_scale) if zero_ptr is None else tl.load(zero_ptr + outputs, mask=mask, other=0.0)
    scale = old_scale
    if curvature_product_ptr is not None:
        gradient = tl.zeros_like(scale)
        curvature = tl.zeros_like(scale)
        for begin in range(0, size, COLUMNS):
            at = (begin + columns)[:, None] * num_outputs + outputs[None, :]
            inside = (begin + columns < size)[:, None] & mask[None, :]
            level = tl.load(levels_ptr + at, mask=inside, other=0.0)
            gradient += tl.sum(level * tl.load(gradient_ptr + at, mask=inside, other=0.0), axis=0)
            curvature += tl.sum(level * tl.load(curvature_product_ptr + at, mask=inside, other=0.0), axis=0)
        best = _stored(old_scale - tl.div_rn(gradient, curvature), STORED, FLOAT)
        scale = tl.where((curvature > 0) & (best > 0) & (best < float("inf")), best, old_scale)
    scale_delta = scale - old_scale
    tl.store(best_ptr + outputs, scale, mask=mask)
    for begin in range(0, size, COLUMNS):
        here = begin + columns
        at = here[:, None] * num_outputs + outputs[None, :]
        inside = (here < size)[:, None] & mask[None, :]
        g = tl.load(gradient_ptr + at, mask=inside, other=0.0)
        if curvature_product_ptr is not None:
            g += tl.load(curvature_product_ptr + at, mask=inside, other=0.0) * scale_delta[None, :]
        for past in range(0, begin, COLUMNS):
            for k in tl.static_range(COLUMNS):
                move = tl.load(moves_ptr + (past + k) * num_outputs + outputs, mask=mask, other=0.0)
                h = tl.load(
                    h_ptr + (past + k) * row_stride + here * column_stride, mask=here < size, other=0.0
                )
                g += h[:, None] * move[None, :]
        levels = tl.zeros_like(g)
        moves = tl.zeros_like(g)
        for i in tl.static_range(COLUMNS):
            is_column = (columns == i)[:, None]
            there = mask & (begin + i < size)
            old = tl.load(levels_ptr + (begin + i) * num_outputs + outputs, mask=there, other=0.0)
            inv_diag = tl.load(inv_diag_ptr + begin + i, mask=begin + i < size, other=0.0)
            wanted = old * scale - tl.sum(tl.where(is_column, g, 0.0), axis=0) * inv_diag
            level = _nearest(tl.div_rn(wanted, scale), zero, LOWEST, HIGHEST, FLOAT) - zero
            move = (level - old) * scale
            h = tl.load(
                h_ptr + (begin + i) * row_stride + here * column_stride,
                mask=(here < size) & (begin + i < size),
                other=0.0,
            )
            g += h[:, None] * move[None, :]
            levels = tl.where(is_column, level[None, :], levels)
            moves = tl.where(is_column, move[None, :], moves)
        tl.store(new_ptr + at, levels, mask=inside)
        tl.store(moves_ptr + at, moves, mask=inside)
        tl.debug_barrier()  # later columns load moves that other lanes have stored
    if curvature_product_ptr is not None:
        for begin in range(0, size, COLUMNS):
            at = (begin + columns)[:, None] * num_outputs + outputs[None, :]
            inside = (begin + columns < size)[:, None] & mask[None, :]
            move = (
                tl.load(moves_ptr + at, mask=inside, other=0.0)
                + tl.load(levels_ptr + at, mask=inside, other=0.0) * scale_delta[None, :]
            )
            tl.store(moves_ptr + at, move, mask=inside)
