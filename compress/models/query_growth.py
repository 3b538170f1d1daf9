"""The factors of queries that grow with their position."""

import torch
from torch import Tensor

from compress.models.arch import Arch


def query_growth(arch: Arch, positions: Tensor) -> Tensor:
    """Return the factor of the query at each position in layers whose queries grow, float32."""
    assert arch.query_growth is not None
    factor, num_positions = arch.query_growth
    return 1 + factor * torch.log(1 + torch.floor((positions + arch.growth_offset) / num_positions))


def position_logs(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ln(p + 1) of each position p, rounded to `dtype`."""
    return torch.log((positions + 1).to(torch.float32)).to(dtype)


def growth_of_logs(scale_H: Tensor, base_H: Tensor, logs_S: Tensor) -> Tensor:
    """Return the factor [S, H] of each head of queries at positions with these logarithms; the parameters of
    the heads are rounded to the dtype of the logarithms first."""
    return scale_H.to(logs_S.dtype) * logs_S.unsqueeze(-1) + base_H.to(logs_S.dtype)


def learned_growth(scale_H: Tensor, base_H: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor [S, H] of each head of the queries at each position, from the parameters of a layer;
    all numbers are rounded to `dtype` first, as `transformers` rounds them."""
    return growth_of_logs(scale_H, base_H, position_logs(positions, dtype))
