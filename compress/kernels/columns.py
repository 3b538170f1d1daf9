"""Columns of a block, one after the other: the inner loops of GPTQ and of coordinate descent, in torch and as one launch.

    round      w_i -= sum_{j < i} U_ji e_j;   c_i = nearest(w_i);   e_i = (w_i - value(c_i)) / U_ii
    descend    g_i += sum_{j < i} H_ji m_j;   l_i = nearest(l_i s - g_i pull_i);   m_i = (new l_i - old l_i) s

`methods/gptq.py` and `methods/descent.py` say what they mean. A column waits for those before it, and outputs do not know one another: a
program holds what the columns so far have left behind for a few outputs, and a block is one launch where torch needs ten for each column.
It sums over j anew for each column, by a tree; torch adds to all later columns at once, so last bits differ.

Shapes: B columns of a block, O outputs. Everything is float32, and contiguous but for H and U, which may have any strides (a factor comes
transposed from some libraries).
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.launch import jit, tl, triton
from compress.quant.numerics import nearest_codes
from compress.quant.scheme import Scheme

OUTPUTS, WARPS = 64, 4
"""Outputs of a program: with 128 columns, 64 numbers in the registers of a thread."""


def round_block(w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and errors e [B, O]; U is upper triangular."""
    if w_BO.is_cuda and triton is not None:
        return launch_round(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    w_BO, codes_BO, errors_BO = w_BO.clone(), torch.empty_like(w_BO), torch.empty_like(w_BO)
    for i in range(len(w_BO)):
        zero_O = None if zero_BO is None else zero_BO[i]
        codes_BO[i] = nearest_codes(w_BO[i], scheme, scale_BO[i], zero_O)
        value_O = (codes_BO[i] if zero_O is None else codes_BO[i] - zero_O) * scale_BO[i]
        errors_BO[i] = (w_BO[i] - value_O) / factor_BB[i, i]
        w_BO[i + 1 :].addr_(factor_BB[i, i + 1 :], errors_BO[i], alpha=-1)
    return codes_BO, errors_BO


def descend_block(
    levels_BO: Tensor, g_BO: Tensor, h_BB: Tensor, pull_B: Tensor, scheme: Scheme, scale_O: Tensor, zero_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    """New levels, which are codes less their zero points, and moves m [B, O]; H is symmetric."""
    if levels_BO.is_cuda and triton is not None:
        return launch_descend(levels_BO, g_BO, h_BB, pull_B, scheme, scale_O, zero_O)
    g_BO, new_BO, moves_BO = g_BO.clone(), torch.empty_like(levels_BO), torch.empty_like(levels_BO)
    for i, old_O in enumerate(levels_BO):
        codes_O = nearest_codes(old_O * scale_O - g_BO[i] * pull_B[i], scheme, scale_O, zero_O)
        new_BO[i] = codes_O if zero_O is None else codes_O - zero_O
        moves_BO[i] = (new_BO[i] - old_O) * scale_O
        g_BO.addr_(h_BB[i], moves_BO[i])
    return new_BO, moves_BO


def launch_round(w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None) -> tuple[Tensor, Tensor]:
    """`round_block` in one launch."""
    return _launched(_round, scheme, w_BO, factor_BB, scale_BO, zero_BO)


def launch_descend(
    levels_BO: Tensor, g_BO: Tensor, h_BB: Tensor, pull_B: Tensor, scheme: Scheme, scale_O: Tensor, zero_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`descend_block` in one launch."""
    return _launched(_descend, scheme, levels_BO, h_BB, scale_O, zero_O, g_BO, pull_B)


def _launched(
    kernel: Any, scheme: Scheme, block_BO: Tensor, matrix_BB: Tensor, scale: Tensor, zero: Tensor | None, *beside: Tensor
) -> tuple[Tensor, Tensor]:
    """The two results [B, O] of a kernel of this file; parameters of both stand in one order, with what one alone has behind the inputs."""
    size, num_outputs = block_BO.shape
    results = torch.empty_like(block_BO), torch.empty_like(block_BO)
    kernel[(triton.cdiv(num_outputs, OUTPUTS),)](
        *(block_BO, matrix_BB, scale, zero, *beside, *results, *matrix_BB.stride(), size, num_outputs),
        BLOCK=triton.next_power_of_2(size),
        OUTPUTS=OUTPUTS,
        LOWEST=scheme.min_code,
        HIGHEST=scheme.max_code,
        FLOAT=scheme.type == "float",
        num_warps=WARPS,
        enable_fp_fusion=False,  # values are products rounded to float32, as the reference has them
    )
    return results


@jit()
def _nearest(x: tl.tensor, zero: tl.tensor, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, FLOAT: tl.constexpr) -> tl.tensor:
    """The code nearest to x, half to even, as float32. The last bit of 1.5 * 2^23 is 1; x is small beside it or saturates."""
    if FLOAT:
        x = tl.minimum(tl.maximum(x, LOWEST), HIGHEST)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power * 0.125, 0.001953125)  # between neighbours of the grid: three bits of mantissa, down to 2^-9
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
    mask, before = outputs < num_outputs, tl.arange(0, BLOCK)
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
def _descend(
    levels_ptr: tl.tensor,
    h_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    g_ptr: tl.tensor,
    pull_ptr: tl.tensor,
    new_ptr: tl.tensor,
    moves_ptr: tl.tensor,
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
    mask, before = outputs < num_outputs, tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + outputs, mask=mask, other=1.0)
    zero = tl.zeros_like(scale) if zero_ptr is None else tl.load(zero_ptr + outputs, mask=mask, other=0.0)
    moves = tl.zeros((BLOCK, OUTPUTS), tl.float32)
    for i in range(size):
        at = i * num_outputs + outputs
        h = tl.load(h_ptr + i * row_stride + before * column_stride, mask=before < i, other=0.0)
        g = tl.load(g_ptr + at, mask=mask, other=0.0) + tl.sum(h[:, None] * moves, axis=0)
        old = tl.load(levels_ptr + at, mask=mask, other=0.0)
        wanted = old * scale - g * tl.load(pull_ptr + i)
        level = _nearest(tl.div_rn(wanted, scale), zero, LOWEST, HIGHEST, FLOAT) - zero
        move = (level - old) * scale
        tl.store(new_ptr + at, level, mask=mask)
        tl.store(moves_ptr + at, move, mask=mask)
        moves = tl.where((before == i)[:, None], move[None, :], moves)
