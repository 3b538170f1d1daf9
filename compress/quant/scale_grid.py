"""Scales of four-bit floats, which are stored in a byte: the numbers that a scale may be, and their bytes.

    e8m0   2^(byte - 127) (OCP Microscaling Formats 1.0); 255 is no number
    e4m3   an e4m3 number divided by the `global_scale` of the matrix, a float32 number (NVFP4)

A global scale that is chosen here is a power of two. So e4m3 scales in memory are numbers with three bits of
mantissa, whatever the global scale: products with codes have at most six significant bits, and every 16-bit
dtype holds them exactly. Mostly it is 512: e4m3 then has all its precision for scales from 2^-15 to 0.44,
which is what weights have, and matrices that a consumer multiplies as one have one global scale without
knowing of one another.

Shapes: O out, G scale groups.
"""

import torch
from torch import Tensor

PREFERRED_EXPONENT = 9
"""log2 of the global scale of matrices whose scales are all from 2^-15 to a half."""
SMALLEST_EXPONENT = 6
"""The smallest e4m3 number with three bits of mantissa is 2^-6."""
LARGEST_EXPONENT = 7
"""The largest stored e4m3 scale is below 2^8, with room for 1.75 times as much."""
BIAS = 127
NOT_A_NUMBER = 255
LARGEST_BYTE = 252
"""The largest byte of e8m0 with which all codes are below the largest number of bfloat16."""


def nearest(scale: Tensor, scale_type: str, dtype: torch.dtype) -> Tensor:
    """Return the nearest number of the grid in `dtype`; zeros and negative numbers have no place and come
    back as they are."""
    wide = scale.to(torch.float32)
    bits = wide.contiguous().view(torch.int32)
    if scale_type == "e4m3":
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF  # half-way cases to the even mantissa
    else:
        bits = (bits + 0x400000) & ~0x7FFFFF
    stored = bits.view(torch.float32).clamp(max=_largest_power(dtype))
    return torch.where(wide > 0, stored, wide).to(dtype)


def power_above(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least power of two that is no smaller than the scale, in `dtype`; 0 for 0."""
    mantissa, exponent = torch.frexp(scale.to(torch.float32))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.ldexp(torch.ones_like(mantissa), exponent).clamp(max=_largest_power(dtype))
    return torch.where(scale > 0, power, torch.zeros_like(power)).to(dtype)


def _largest_power(dtype: torch.dtype) -> float:
    """Return the largest scale with which every code is a number of `dtype`."""
    return 2.0**13 if dtype == torch.float16 else 2.0 ** (LARGEST_BYTE - BIAS)


def to_e8m0(scale_OG: Tensor) -> Tensor:
    """Return the bytes of scales that are powers of two."""
    _, exponent = torch.frexp(scale_OG.to(torch.float32))
    return (exponent - 1 + BIAS).clamp(0, LARGEST_BYTE).to(torch.uint8)


def from_e8m0(stored_OG: Tensor) -> Tensor:
    """Return scales in float32."""
    exponent = stored_OG.to(torch.int32) - BIAS
    return torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent)


def global_scale_of(scale_OG: Tensor) -> Tensor:
    """Return the global scale of a matrix with these scales, a power of two as a float32 scalar."""
    scale_OG = scale_OG.to(torch.float32)
    _, exponent = torch.frexp(scale_OG.amax())
    largest = LARGEST_EXPONENT - (exponent - 1)
    fits = (scale_OG.amin() * 2.0 ** (PREFERRED_EXPONENT + SMALLEST_EXPONENT) >= 1) & (
        largest > PREFERRED_EXPONENT
    )
    power = torch.where(fits, torch.full_like(largest, PREFERRED_EXPONENT), largest)
    return torch.ldexp(torch.ones((), device=scale_OG.device), power)


def to_e4m3(scale_OG: Tensor, global_scale: Tensor) -> Tensor:
    """Return scales as they are stored, the nearest e4m3 numbers: 0 for a group whose weights are nothing
    beside the largest of the matrix."""
    return (scale_OG.to(torch.float32) * global_scale).clamp(max=448.0).to(torch.float8_e4m3fn)


def from_e4m3(stored_OG: Tensor, global_scale: Tensor) -> Tensor:
    """Return scales in float32."""
    return stored_OG.to(torch.float32) / global_scale
