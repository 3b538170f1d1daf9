"""In which numbers a device computes activations, and products of them whose sums are float32.

A GPU, and a CPU whose tiles multiply bfloat16 (AMX), compute in the 16 bits that the model is stored in; any other CPU in float32, having
nothing faster. Products of two bfloat16 numbers are exact in float32, so a sum of them in float32 is as good as float32 factors of the
same values would give.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from compress.models.tiles import bfloat16_factors, has_bfloat16_tiles


def compute_dtype(device: str, stored_dtype: torch.dtype) -> torch.dtype:
    """Of the activations of a model stored in `stored_dtype`."""
    if torch.device(device).type != "cpu":
        return stored_dtype
    return torch.bfloat16 if stored_dtype == torch.bfloat16 and has_bfloat16_tiles() else torch.float32


def computes_in(device: str) -> dict[str, str]:
    """What of a device decides the numbers that it computes: resume points and results of one are not those of another."""
    kind = torch.device(device).type
    return (
        {"device": kind, "compute": "bfloat16"}
        if kind == "cpu" and has_bfloat16_tiles()
        else {"device": kind}
    )


def add_lower_gram(sum_DD: Tensor | None, x_TD: Tensor, rows: int) -> Tensor:
    """sum + x^T x on a CPU, float32 [D, D], in blocks of rows up to the diagonal: above them is whatever was there. The sum is used up."""
    size = x_TD.shape[1]
    wide_TD = x_TD.to(torch.float32)
    sum_DD = torch.zeros(size, size) if sum_DD is None else sum_DD
    with bfloat16_factors() if x_TD.dtype == torch.bfloat16 else nullcontext():
        for begin in range(0, size, rows):
            end = min(begin + rows, size)
            sum_DD[begin:end, :end] += wide_TD[:, begin:end].t() @ wide_TD[:, :end]
    return sum_DD


def add_gram(sum_DD: Tensor | None, a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """sum + a^T b, float32 [D, D], where no sum is zero. The sum is used up, on a GPU only once there was room for the product."""
    if a_TD.is_cuda and a_TD.dtype == torch.bfloat16:
        product_DD = torch.mm(a_TD.t(), b_TD, out_dtype=torch.float32)
        return product_DD if sum_DD is None else sum_DD.add_(product_DD)
    wide_TD = a_TD.to(torch.float32)
    other_TD = wide_TD if b_TD is a_TD else b_TD.to(torch.float32)
    with bfloat16_factors() if a_TD.dtype == torch.bfloat16 else nullcontext():
        return wide_TD.t() @ other_TD if sum_DD is None else sum_DD.addmm_(wide_TD.t(), other_TD)
