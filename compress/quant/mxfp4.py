"""Weights in MXFP4, blocks of 32 four-bit floats with a scale that is a power of two (OCP Microscaling
Formats 1.0), read as bfloat16.

A code is e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; its scale is e8m0, 2^(s - 127). Products of
the two have two significant bits, so bfloat16 holds every one exactly. Codes are not written here.

Shapes: blocks uint8 [..., N, 16], low half of a byte first; scales uint8 [..., N]; N blocks of a row.
"""

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
MAX_SCALE = 252
"""The largest stored scale with which all codes are below the largest number of bfloat16."""


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights, bfloat16 [..., 32 N].

    Raises:
        UnsupportedFormat: blocks and scales are not of their types, or a scale is not a number.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise UnsupportedFormat(
            f"blocks and scales of MXFP4 are bytes, not {blocks.dtype} and {scales.dtype}."
        )
    if bool((scales > MAX_SCALE).any()):
        raise UnsupportedFormat("a scale of MXFP4 weights is beyond the range of bfloat16, or not a number.")
    values = torch.tensor([*VALUES, *(-each for each in VALUES)], dtype=torch.bfloat16, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = (scales.to(torch.int32) - _BIAS).unsqueeze(-1)
    return torch.ldexp(values[codes.to(torch.int64)], exponents).flatten(-2)
