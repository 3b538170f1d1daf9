"""Columns of a block on a CPU, for integer schemes: in numpy, where an operation on a short row costs a tenth of torch's.

A column looks back instead of forward. Row i of a matrix R [B, O] holds where column i stands before any other moved, and from when it is
decided on what it leaves to those behind it; T [B, B] has ones on its diagonal, and before them the shares that a column takes of that:

    round      x_i = T_i R = w_i - sum_{j < i} (U_ji / U_jj) r_j;              l_i = clamp(round(x_i / s_i));    r_i := x_i - l_i s_i
    descend    x_i = T_i R = l_i - pull_i (g_i / s + sum_{j < i} H_ij r_j);    l'_i = clamp(round(x_i));         r_i := l'_i - l_i

so all that columns have to do with one another is one product of a row with the rows so far: with a few of them, because every few columns
one matrix product tells all that are left. Then e_i = r_i / U_ii, m_i = r_i s. Levels l are codes less their zero points, clamped as such.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.quant.scheme import Scheme

Floats = npt.NDArray[np.float32]

PRODUCT_SIZE = 8192
PRODUCT_OUTPUTS = 1024
"""Numbers of R, and outputs, that one product of a row takes. OpenBLAS shares out 9216 numbers and more among threads of its own, which go
on spinning where torch's are to run; fewer than eight columns at a time leave too much to the matrix products."""


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors e [B, O]."""
    rows_BO = w_BO.clone()
    levels_BO = torch.empty_like(w_BO)
    pivot_B1 = factor_BB.diagonal().unsqueeze(1)
    bounds = (np.broadcast_to(bound, w_BO.shape) for bound in _bounds(scheme, zero_BO, w_BO.shape[1]))
    columns = _columns(rows_BO, (factor_BB / -pivot_B1).t())
    each = zip(columns, scale_BO.numpy(), *bounds, levels_BO.numpy(), rows_BO.numpy(), strict=True)
    for wanted_O, scale_O, lowest_O, highest_O, level_O, left_O in each:
        np.divide(wanted_O, scale_O, out=level_O)
        _settle(level_O, lowest_O, highest_O, out=level_O)
        np.multiply(level_O, scale_O, out=left_O)
        np.subtract(wanted_O, left_O, out=left_O)
    return levels_BO if zero_BO is None else levels_BO.add_(zero_BO), rows_BO.div_(pivot_B1)


def descend(
    levels_BO: Tensor,
    g_BO: Tensor,
    h_BB: Tensor,
    pull_B: Tensor,
    scheme: Scheme,
    scale_O: Tensor,
    zero_O: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """New levels, and what they move the values by [B, O], under scales that stay."""
    new_BO = torch.empty_like(levels_BO)
    pull_B1 = pull_B.unsqueeze(1)
    rows_BO = torch.addcmul(levels_BO, g_BO / scale_O, pull_B1, value=-1)
    lowest_O, highest_O = _bounds(scheme, zero_O, levels_BO.shape[1])
    columns = _columns(rows_BO, h_BB * -pull_B1)
    for wanted_O, old_O, level_O, left_O in zip(
        columns, levels_BO.numpy(), new_BO.numpy(), rows_BO.numpy(), strict=True
    ):
        _settle(wanted_O, lowest_O, highest_O, out=level_O)
        np.subtract(level_O, old_O, out=left_O)
    return new_BO, rows_BO.mul_(scale_O)


def _columns(rows_BO: Tensor, shares_BB: Tensor) -> Iterator[Floats]:
    """x_i, one after the other in the same memory. Before the next is asked for, what the column leaves has to stand in its row."""
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


def _settle(wanted: Floats, lowest: Floats, highest: Floats, *, out: Floats) -> None:
    np.rint(wanted, out=out)
    np.maximum(out, lowest, out=out)
    np.minimum(out, highest, out=out)


def _bounds(scheme: Scheme, zero: Tensor | None, num_outputs: int) -> tuple[Floats, Floats]:
    """The lowest and the highest level."""
    zeros = np.zeros(num_outputs, np.float32) if zero is None else zero.numpy()
    return scheme.min_code - zeros, scheme.max_code - zeros
