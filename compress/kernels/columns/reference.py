"""The loops over columns in torch, for every scheme on every device: a few small operations a column.

The products and their order are those that the package's docstring states; `host.py` and `fused.py` compute
the same in other orders of summation. A product runs this file where they do not: float codes on a CPU, and
any codes on CUDA without triton.

Shapes: B columns of a block, O outputs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from compress.kernels.columns.block import DescentBlock
from compress.quant.numerics import nearest_codes, storable
from compress.quant.scheme import Scheme

Descend = Callable[[DescentBlock], tuple[Tensor, Tensor]]
"""Moves the codes of a block under fixed scales: returns the new levels and the changes of the values, both
[B, O]."""


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and errors e, both [B, O]."""
    w_BO = w_BO.clone()
    codes_BO = torch.empty_like(w_BO)
    errors_BO = torch.empty_like(w_BO)
    for i in range(len(w_BO)):
        zero_O = None if zero_BO is None else zero_BO[i]
        codes_BO[i] = nearest_codes(w_BO[i], scheme, scale_BO[i], zero_O)
        value_O = (codes_BO[i] if zero_O is None else codes_BO[i] - zero_O) * scale_BO[i]
        errors_BO[i] = (w_BO[i] - value_O) / factor_BB[i, i]
        w_BO[i + 1 :].addr_(factor_BB[i, i + 1 :], errors_BO[i], alpha=-1)
    return codes_BO, errors_BO


def descend(block: DescentBlock) -> tuple[Tensor, Tensor]:
    """Return the new levels and the changes of the values, both [B, O], under scales that stay."""
    scale_O = block.scale_O
    gradient_BO = block.gradient_BO.clone()
    new_BO = torch.empty_like(block.levels_BO)
    moves_BO = torch.empty_like(block.levels_BO)
    for i, old_O in enumerate(block.levels_BO):
        wanted_O = old_O * scale_O - gradient_BO[i] * block.inv_diag_B[i]
        codes_O = nearest_codes(wanted_O, block.scheme, scale_O, block.zero_O)
        new_BO[i] = codes_O if block.zero_O is None else codes_O - block.zero_O
        moves_BO[i] = (new_BO[i] - old_O) * scale_O
        gradient_BO.addr_(block.h_BB[i], moves_BO[i])
    return new_BO, moves_BO


def descend_block(
    block: DescentBlock,
    *,
    curvature_product_BO: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    descend: Descend = descend,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new levels, scales [O] and changes of the values, with the loop over columns that `descend`
    is."""
    if curvature_product_BO is None:
        new_BO, moves_BO = descend(block)
        return new_BO, block.scale_O, moves_BO
    best_O = best_scale(
        block.scale_O,
        (block.gradient_BO * block.levels_BO).sum(dim=0),
        (curvature_product_BO * block.levels_BO).sum(dim=0),
        block.scheme,
        scale_dtype,
    )
    scale_delta_O = best_O - block.scale_O
    gradient_BO = torch.addcmul(block.gradient_BO, curvature_product_BO, scale_delta_O)
    new_BO, moves_BO = descend(replace(block, gradient_BO=gradient_BO, scale_O=best_O))
    return new_BO, best_O, moves_BO.addcmul_(block.levels_BO, scale_delta_O)


def best_scale(
    scale_O: Tensor, gradient_O: Tensor, curvature_O: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> Tensor:
    """Return the stored value nearest to the minimum of the loss in each scale, float32 [O].

    `gradient_O` and `curvature_O` are half the first and half the second derivative of the loss in the scale.
    A scale whose codes are all zero, or whose best value is not positive, stays as it is.
    """
    best_O = storable(scale_O - gradient_O / curvature_O, scheme, scale_dtype).to(torch.float32)
    return torch.where((curvature_O > 0) & (best_O > 0) & torch.isfinite(best_O), best_O, scale_O)
