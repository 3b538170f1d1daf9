"""Columns of a block in one launch: a program holds what the columns so far have left behind for a few outputs.

It sums over j in another order than torch, so last bits differ from `reference.py`. H and U may have any strides (a factor comes transposed
from some libraries).
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, tl, triton
from compress.quant.scheme import Scheme

OUTPUTS = 64
WARPS = 4
"""Outputs of a program: with 128 columns, 64 numbers in the registers of a thread."""
DESCENT_OUTPUTS = 32
DESCENT_COLUMNS = 16
"""Outputs of a warp that descends, and columns that it holds in registers at a time: a step is a sum over few lanes, and no barrier."""


def launch_round(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`round_block` in one launch."""
    size, num_outputs = w_BO.shape
    codes_BO = torch.empty_like(w_BO)
    errors_BO = torch.empty_like(w_BO)
    _round[(triton.cdiv(num_outputs, OUTPUTS),)](
        *(w_BO, factor_BB, scale_BO, zero_BO, codes_BO, errors_BO, *factor_BB.stride(), size, num_outputs),
        BLOCK=triton.next_power_of_2(size),
        OUTPUTS=OUTPUTS,
        num_warps=WARPS,
        **_numbers(scheme),
    )
    return codes_BO, errors_BO


def launch_descend(
    levels_BO: Tensor,
    g_BO: Tensor,
    h_BB: Tensor,
    pull_B: Tensor,
    scheme: Scheme,
    scale_O: Tensor,
    zero_O: Tensor | None,
    *,
    slope_BO: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """`descend_block` in one launch."""
    size, num_outputs = levels_BO.shape
    new_BO = torch.empty_like(levels_BO)
    moves_BO = torch.empty_like(levels_BO)
    best_O = torch.empty_like(scale_O)
    _descend_group[(triton.cdiv(num_outputs, DESCENT_OUTPUTS),)](
        *(
            levels_BO,
            g_BO,
            slope_BO,
            h_BB,
            pull_B,
            scale_O,
            zero_O,
            new_BO,
            moves_BO,
            best_O,
            *h_BB.stride(),
            size,
            num_outputs,
        ),
        COLUMNS=DESCENT_COLUMNS,
        OUTPUTS=DESCENT_OUTPUTS,
        STORED=_STORED[scale_dtype],
        num_warps=1,
        **_numbers(scheme),
    )
    return new_BO, best_O, moves_BO


_STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _numbers(scheme: Scheme) -> dict[str, Any]:
    """The numbers that codes are, and products rounded to float32, as the reference has them."""
    return {
        "LOWEST": scheme.min_code,
        "HIGHEST": scheme.max_code,
        "FLOAT": scheme.type == "float",
        "enable_fp_fusion": False,
    }


@jit()
def _nearest(
    x: tl.tensor, zero: tl.tensor, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FLOAT: tl.constexpr
) -> tl.tensor:
    """The code nearest to x, half to even, as float32. The last bit of 1.5 * 2^23 is 1; x is small beside it or saturates."""
    if FLOAT:
        x = tl.minimum(tl.maximum(x, LOWEST), HIGHEST)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(
            power * 0.125, 0.001953125
        )  # between neighbours of the grid: three bits of mantissa, down to 2^-9
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
    """`quant.numerics.storable` of what `_STORED` numbers."""
    if STORED == 0:
        return scale
    if STORED == 1:
        return scale.to(tl.float16).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True)  # to bfloat16, half to even
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
    g_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    h_ptr: tl.tensor,
    pull_ptr: tl.tensor,
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
    """A few columns at a time stand in registers; what they owe to those before comes in one go, since nothing is stored meanwhile that a
    load would have to wait for."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = outputs < num_outputs
    columns = tl.arange(0, COLUMNS)
    old_scale = tl.load(scale_ptr + outputs, mask=mask, other=1.0)
    zero = tl.zeros_like(old_scale) if zero_ptr is None else tl.load(zero_ptr + outputs, mask=mask, other=0.0)
    scale = old_scale
    if slope_ptr is not None:
        fall = tl.zeros_like(scale)
        curvature = tl.zeros_like(scale)
        for begin in range(0, size, COLUMNS):
            at = (begin + columns)[:, None] * num_outputs + outputs[None, :]
            inside = (begin + columns < size)[:, None] & mask[None, :]
            level = tl.load(levels_ptr + at, mask=inside, other=0.0)
            fall += tl.sum(level * tl.load(g_ptr + at, mask=inside, other=0.0), axis=0)
            curvature += tl.sum(level * tl.load(slope_ptr + at, mask=inside, other=0.0), axis=0)
        best = _stored(old_scale - tl.div_rn(fall, curvature), STORED, FLOAT)
        scale = tl.where((curvature > 0) & (best > 0) & (best < float("inf")), best, old_scale)
    turn = scale - old_scale
    tl.store(best_ptr + outputs, scale, mask=mask)
    for begin in range(0, size, COLUMNS):
        here = begin + columns
        at = here[:, None] * num_outputs + outputs[None, :]
        inside = (here < size)[:, None] & mask[None, :]
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
        if slope_ptr is not None:
            g += tl.load(slope_ptr + at, mask=inside, other=0.0) * turn[None, :]
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
            pull = tl.load(pull_ptr + begin + i, mask=begin + i < size, other=0.0)
            wanted = old * scale - tl.sum(tl.where(is_column, g, 0.0), axis=0) * pull
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
        tl.debug_barrier()  # what comes after reads what other lanes have stored
    if slope_ptr is not None:
        for begin in range(0, size, COLUMNS):
            at = (begin + columns)[:, None] * num_outputs + outputs[None, :]
            inside = (begin + columns < size)[:, None] & mask[None, :]
            move = (
                tl.load(moves_ptr + at, mask=inside, other=0.0)
                + tl.load(levels_ptr + at, mask=inside, other=0.0) * turn[None, :]
            )
            tl.store(moves_ptr + at, move, mask=inside)
