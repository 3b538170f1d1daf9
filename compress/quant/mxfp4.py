"""Weights in MXFP4, blocks of 32 four-bit floats with a scale that is a power of two (OCP Microscaling
Formats 1.0), read as bfloat16.

A code is e2m1 (`e2m1.py`); its scale is e8m0, 2^(s - 127) (`scale_grid.py`). Products of the two have two
significant bits, so bfloat16 holds every one exactly. The layout is that of gpt-oss; the scheme `MXFP4`
writes codes and scales as compressed-tensors has them.

Shapes: blocks uint8 [..., N, 16], low half of a byte first; scales uint8 [..., N]; N blocks of a row.
"""

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.quant import e2m1
from compress.quant.scale_grid import BIAS, LARGEST_BYTE

BLOCK = 32


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights, bfloat16 [..., 32 N].

    Raises:
        UnsupportedFormat: blocks and scales are not of their types, or a scale is not a number.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise UnsupportedFormat(
            f"blocks and scales of MXFP4 are bytes, not {blocks.dtype} and {scales.dtype}."
        )
    if bool((scales > LARGEST_BYTE).any()):
        raise UnsupportedFormat("a scale of MXFP4 weights is beyond the range of bfloat16, or not a number.")
    exponents = (scales.to(torch.int32) - BIAS).unsqueeze(-1)
    return torch.ldexp(e2m1.unpack(blocks).to(torch.bfloat16), exponents).flatten(-2)
