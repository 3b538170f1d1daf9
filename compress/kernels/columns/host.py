"""The loops over columns on a CPU, for integer codes: in numpy, where an operation on a short row costs a
tenth of torch's.

A column gathers from the columns before it instead of updating those after it. Row i of a matrix R [B, O]
first holds the value of column i before any other column moved, and, once its code is chosen, the remainder
r_i that later columns read. T [B, B] has ones on its diagonal and to their left the share of each remainder
that a column takes:

    round      x_i = T_i R = w_i - sum_{j < i} (U_ji / U_jj) r_j
               l_i = clamp(round(x_i / s_i));   r_i := x_i - l_i s_i
    descend    x_i = T_i R = l_i - (g_i / s + sum_{j < i} H_ij r_j) / H_ii
               l'_i = clamp(round(x_i));        r_i := l'_i - l_i

so a column costs one product of a row of T with the rows of R so far. Only a few rows: after every few
columns one matrix product adds their remainders to all columns that are left. Afterwards e_i = r_i / U_ii and
m_i = r_i s. Levels l are codes less their zero points, and are clamped as such.

Shapes: B columns of a block, O outputs.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.kernels.columns.block import DescentBlock
from compress.quant.scheme import Scheme

Floats = npt.NDArray[np.float32]

PRODUCT_SIZE = 8192
"""Numbers of R that one product of a row reads. From 9216 numbers on OpenBLAS splits the product over threads
of its own, which then spin where torch's threads are to run."""
PRODUCT_OUTPUTS = 1024
"""Outputs of one product of a row: so at least eight columns go between two matrix products, which fewer
would make too many."""


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and errors e, both [B, O]."""
    rows_BO = w_BO.clone()
    levels_BO = torch.empty_like(w_BO)
    pivot_B1 = factor_BB.diagonal().unsqueeze(1)
    bounds = (np.broadcast_to(bound, w_BO.shape) for bound in _bounds(scheme, zero_BO, w_BO.shape[1]))
    columns = _columns(rows_BO, (factor_BB / -pivot_B1).t())
    each = zip(columns, scale_BO.numpy(), *bounds, levels_BO.numpy(), rows_BO.numpy(), strict=True)
    for wanted_O, scale_O, lowest_O, highest_O, level_O, remainder_O in each:
        np.divide(wanted_O, scale_O, out=level_O)
        _round_and_clamp(level_O, lowest_O, highest_O, out=level_O)
        np.multiply(level_O, scale_O, out=remainder_O)
        np.subtract(wanted_O, remainder_O, out=remainder_O)
    return levels_BO if zero_BO is None else levels_BO.add_(zero_BO), rows_BO.div_(pivot_B1)


def descend(block: DescentBlock) -> tuple[Tensor, Tensor]:
    """Return the new levels and the changes of the values, both [B, O], under scales that stay."""
    levels_BO = block.levels_BO
    new_BO = torch.empty_like(levels_BO)
    inv_diag_B1 = block.inv_diag_B.unsqueeze(1)
    rows_BO = torch.addcmul(levels_BO, block.gradient_BO / block.scale_O, inv_diag_B1, value=-1)
    lowest_O, highest_O = _bounds(block.scheme, block.zero_O, levels_BO.shape[1])
    columns = _columns(rows_BO, block.h_BB * -inv_diag_B1)
    each = zip(columns, levels_BO.numpy(), new_BO.numpy(), rows_BO.numpy(), strict=True)
    for wanted_O, old_O, level_O, remainder_O in each:
        _round_and_clamp(wanted_O, lowest_O, highest_O, out=level_O)
        np.subtract(level_O, old_O, out=remainder_O)
    return new_BO, rows_BO.mul_(block.scale_O)


def _columns(rows_BO: Tensor, shares_BB: Tensor) -> Iterator[Floats]:
    """Yield x_i [O] of each column, always in the same memory.

    The caller writes the remainder of the column into its row of `rows_BO` before it asks for the next
    column.
    """
    size, num_outputs = rows_BO.shape
    shares_BB = shares_BB.contiguous()
    shares_BB.diagonal().fill_(1)
    rows = rows_BO.numpy()
    shares = shares_BB.numpy()
    wanted_O = np.empty(num_outputs, np.float32)
    pieces = [np.s_[first : first + PRODUCT_OUTPUTS] for first in range(0, num_outputs, PRODUCT_OUTPUTS)]
    parts = [(rows[:, piece], wanted_O[piece]) for piece in pieces]
    at_once = PRODUCT_SIZE // min(num_outputs, PRODUCT_OUTPUTS)
    for begin in range(0, size, at_once):
        end = min(begin + at_once, size)
        for i in range(begin, end):
            shares_K = shares[i, begin : i + 1]
            for some_rows, some_wanted in parts:
                np.dot(shares_K, some_rows[begin : i + 1], out=some_wanted)
            yield wanted_O
        rows_BO[end:].addmm_(shares_BB[end:, begin:end], rows_BO[begin:end])


def _round_and_clamp(wanted: Floats, lowest: Floats, highest: Floats, *, out: Floats) -> None:
    """Write the nearest levels in range to `out`, ties to even."""
    np.rint(wanted, out=out)
    np.maximum(out, lowest, out=out)
    np.minimum(out, highest, out=out)


def _bounds(scheme: Scheme, zero: Tensor | None, num_outputs: int) -> tuple[Floats, Floats]:
    """Return the lowest and the highest level, [O] or the shape of `zero`."""
    zeros = np.zeros(num_outputs, np.float32) if zero is None else zero.numpy()
    return scheme.min_code - zeros, scheme.max_code - zeros
