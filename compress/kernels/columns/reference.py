"""Columns of a block in torch, for any scheme on any device: a column is a few small operations and an update of those to come."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.quant.numerics import nearest_codes, storable
from compress.quant.scheme import Scheme


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors e [B, O]."""
    w_BO, codes_BO, errors_BO = w_BO.clone(), torch.empty_like(w_BO), torch.empty_like(w_BO)
    for i in range(len(w_BO)):
        zero_O = None if zero_BO is None else zero_BO[i]
        codes_BO[i] = nearest_codes(w_BO[i], scheme, scale_BO[i], zero_O)
        value_O = (codes_BO[i] if zero_O is None else codes_BO[i] - zero_O) * scale_BO[i]
        errors_BO[i] = (w_BO[i] - value_O) / factor_BB[i, i]
        w_BO[i + 1 :].addr_(factor_BB[i, i + 1 :], errors_BO[i], alpha=-1)
    return codes_BO, errors_BO


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
    if scheme.type == "int":
        return _descend_integers(levels_BO, g_BO, h_BB, pull_B, scheme, scale_O, zero_O)
    g_BO = g_BO.clone()
    new_BO = torch.empty_like(levels_BO)
    moves_BO = torch.empty_like(levels_BO)
    for i, old_O in enumerate(levels_BO):
        new_BO[i] = nearest_codes(old_O * scale_O - g_BO[i] * pull_B[i], scheme, scale_O, zero_O)
        moves_BO[i] = (new_BO[i] - old_O) * scale_O
        g_BO.addr_(h_BB[i], moves_BO[i])
    return new_BO, moves_BO


def descend_block(
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
    descend: Callable[..., tuple[Tensor, Tensor]] = descend,
) -> tuple[Tensor, Tensor, Tensor]:
    """New levels, new scales [O] and moves, with the loop over columns of `descend`."""
    if slope_BO is None:
        new_BO, moves_BO = descend(levels_BO, g_BO, h_BB, pull_B, scheme, scale_O, zero_O)
        return new_BO, scale_O, moves_BO
    best_O = best_scale(
        scale_O, (g_BO * levels_BO).sum(dim=0), (slope_BO * levels_BO).sum(dim=0), scheme, scale_dtype
    )
    turn_O = best_O - scale_O
    new_BO, moves_BO = descend(
        levels_BO, torch.addcmul(g_BO, slope_BO, turn_O), h_BB, pull_B, scheme, best_O, zero_O
    )
    return new_BO, best_O, moves_BO.addcmul_(levels_BO, turn_O)


def best_scale(
    scale_O: Tensor, fall_O: Tensor, curvature_O: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> Tensor:
    """The stored value nearest to the bottom of a parabola; a scale of zeros only, or whose best is not positive, stays as it is."""
    best_O = storable(scale_O - fall_O / curvature_O, scheme, scale_dtype).to(torch.float32)
    return torch.where((curvature_O > 0) & (best_O > 0) & torch.isfinite(best_O), best_O, scale_O)


def _descend_integers(
    levels_BO: Tensor,
    g_BO: Tensor,
    h_BB: Tensor,
    pull_B: Tensor,
    scheme: Scheme,
    scale_O: Tensor,
    zero_O: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """In units of the scales, where a column is five small operations."""
    g_BO = g_BO / scale_O
    new_BO = torch.empty_like(levels_BO)
    steps_BO = torch.empty_like(levels_BO)
    lowest, highest = (
        torch.as_tensor(code, device=g_BO.device) - (0 if zero_O is None else zero_O)
        for code in (scheme.min_code, scheme.max_code)
    )
    for i, pull in enumerate(pull_B.tolist()):
        torch.sub(levels_BO[i], g_BO[i], alpha=pull, out=new_BO[i]).round_().clamp_(lowest, highest)
        torch.sub(new_BO[i], levels_BO[i], out=steps_BO[i])
        g_BO[i + 1 :].addr_(h_BB[i, i + 1 :], steps_BO[i])
    return new_BO, steps_BO.mul_(scale_O)
