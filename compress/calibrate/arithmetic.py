"""In which numbers a device computes activations, and products of them whose sums are float32.

A GPU, and a CPU whose tiles multiply bfloat16 (AMX), compute in the 16 bits that the model is stored in; any other CPU in float32, having
nothing faster. Products of two bfloat16 numbers are exact in float32, so a sum of them in float32 is as good as float32 factors of the
same values would give.
"""

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
    return {"device": kind, "compute": "bfloat16"} if kind == "cpu" and has_bfloat16_tiles() else {"device": kind}


def gram(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """a^T b, float32 [D, D]."""
    if a_TD.dtype != torch.bfloat16:
        return a_TD.to(torch.float32).t() @ b_TD.to(torch.float32)
    if a_TD.is_cuda:
        return torch.mm(a_TD.t(), b_TD, out_dtype=torch.float32)
    wide_TD = a_TD.to(torch.float32)
    with bfloat16_factors():
        return wide_TD.t() @ (wide_TD if b_TD is a_TD else b_TD.to(torch.float32))
