"""The dtype in which a device computes activations, and products of activations with float32 sums.

A GPU, and a CPU whose tiles multiply bfloat16 (AMX), compute in the 16 bits that the model is stored in. Any
other CPU computes in float32, because it has nothing faster. Products of two bfloat16 numbers are exact in
float32, so their float32 sum is as good as that of float32 factors of the same values.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from compress.models.tiles import bfloat16_factors, has_bfloat16_tiles


def compute_dtype(device: str, stored_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the activations of a model stored in `stored_dtype`."""
    if torch.device(device).type != "cpu":
        return stored_dtype
    return torch.bfloat16 if stored_dtype == torch.bfloat16 and has_bfloat16_tiles() else torch.float32


def computes_in(device: str) -> dict[str, str]:
    """Return the facts of a device that decide the numbers it computes; resume points and results are shared
    only between equal facts."""
    kind = torch.device(device).type
    return (
        {"device": kind, "compute": "bfloat16"}
        if kind == "cpu" and has_bfloat16_tiles()
        else {"device": kind}
    )


def add_lower_gram(sum_DD: Tensor | None, x_TD: Tensor, rows: int) -> Tensor:
    """Return sum + x^T x on a CPU, float32 [D, D], in blocks of rows up to the diagonal; the values above
    them are arbitrary. Overwrites `sum_DD`."""
    size = x_TD.shape[1]
    wide_TD = x_TD.to(torch.float32)
    sum_DD = torch.zeros(size, size) if sum_DD is None else sum_DD
    with bfloat16_factors() if x_TD.dtype == torch.bfloat16 else nullcontext():
        for begin in range(0, size, rows):
            end = min(begin + rows, size)
            sum_DD[begin:end, :end] += wide_TD[:, begin:end].t() @ wide_TD[:, :end]
    return sum_DD


def add_gram(sum_DD: Tensor | None, a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """Return sum + a^T b, float32 [D, D]; a sum of None counts as zero. Overwrites `sum_DD`, on a GPU only
    after the product was allocated."""
    if a_TD.is_cuda and a_TD.dtype == torch.bfloat16:
        product_DD = torch.mm(a_TD.t(), b_TD, out_dtype=torch.float32)
        return product_DD if sum_DD is None else sum_DD.add_(product_DD)
    wide_TD = a_TD.to(torch.float32)
    other_TD = wide_TD if b_TD is a_TD else b_TD.to(torch.float32)
    with bfloat16_factors() if a_TD.dtype == torch.bfloat16 else nullcontext():
        return wide_TD.t() @ other_TD if sum_DD is None else sum_DD.addmm_(wide_TD.t(), other_TD)
