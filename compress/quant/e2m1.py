"""Four-bit floats (e2m1 of OCP Microscaling Formats 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

A code in memory is an e4m3 number, which holds all sixteen, negative zero included. On disk it is a half of a
byte, sign above the index into `VALUES`, the code of a lower column in the low half.

Shapes: O out, I in.
"""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = VALUES[-1]
SIGN = 8
"""The bit of the sign in a half of a byte."""


def nearest(x: Tensor) -> Tensor:
    """Return the nearest code as float32, half-way cases to the even index; saturates at 6."""
    x = x.to(torch.float32).clamp(-LARGEST, LARGEST)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def pack(codes_OI: Tensor) -> Tensor:
    """Pack e4m3 codes [O, I], all of which are numbers of e2m1, into bytes [O, I / 2]."""
    halves_OI = halves(codes_OI)
    return halves_OI[..., ::2] | (halves_OI[..., 1::2] << 4)


def halves(codes: Tensor) -> Tensor:
    """Return the halves of bytes that e4m3 codes are, as uint8 from 0 to 15; all of them are numbers of
    e2m1."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[_numbers().view(torch.uint8).to(torch.int64)] = torch.arange(16, dtype=torch.uint8)
    return table.to(codes.device)[codes.view(torch.uint8).to(torch.int64)]


def unpack(bytes_OI: Tensor) -> Tensor:
    """Unpack bytes [O, I / 2] into e4m3 codes [O, I]; the inverse of `pack`."""
    halves = torch.stack((bytes_OI & 15, bytes_OI >> 4), dim=-1).flatten(-2)
    numbers = _numbers().view(torch.uint8).to(bytes_OI.device)
    return numbers[halves.to(torch.int64)].view(torch.float8_e4m3fn)


def _numbers() -> Tensor:
    """Return the number of each half of a byte, e4m3 [16]."""
    return torch.tensor([*VALUES, *(-each for each in VALUES)]).to(torch.float8_e4m3fn)
