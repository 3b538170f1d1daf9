"""Decode linear of four-bit floats (e2m1 in MXFP4 and NVFP4) by 16-bit rows on Hopper: a code is bits of a
16-bit number, and its scale makes it one.

    y = outer (x w^T),   w = e2m1(code) scale[:, g]        groups g of 16 or 32 columns

A product of a code and a scale has at most six significant bits, so w is exact (`operands/matrices.py` has
`outer`), and all groups of 128 columns go into one sum. Each row is multiplied by a power of two, so that its
largest scale is near the largest number of 16 bits: a code's bits, read as a number, are 2^-126 of it (2^-14
in float16), and their product with that scale is near 1. `outer` takes the power off.

Packed layout: blocks as in `w4a16.py`, 1024 bytes of codes and 16 scales for each scale group of the 128
columns, with other words. In either half of a word, code j of a thread has its magnitude in three bits from
`MAGNITUDES[j]` up and its sign in bit `SIGNS[j]`: moved by a shift or two, they lie where a 16-bit number has
the lowest two bits of its exponent and the highest of its mantissa, and its sign.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from compress.kernels.linear.coded import coded
from compress.kernels.linear.decode_kernels import decode_kernels
from compress.kernels.linear.hopper import refusal as hopper_refusal
from compress.kernels.linear.w4a16 import PackedW4, hopper_linear, pack_blocks, subgroups_of
from compress.kernels.operands.matrices import e2m1_scales, refuse_powers
from compress.kernels.problem import Problem
from compress.kernels.select import register
from compress.quant import e2m1
from compress.quant.scheme import SCHEMES, QuantizedWeight

MULTIPLIED = ("MXFP4", "NVFP4")
MAGNITUDES = {torch.bfloat16: (6, 3, 0, 9), torch.float16: (9, 6, 3, 0)}
SIGNS = (15, 12, 13, 14)
LARGEST = {torch.bfloat16: 127, torch.float16: 15}
"""Scales of a row are below two to the power of this."""
UNIT = {torch.bfloat16: -126, torch.float16: -14}
"""The bits of a code are this power of two of it."""


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedW4:
    """Stack weights along O and pack them in blocks."""
    quantized = coded(weights)
    halves_OI = torch.cat([e2m1.halves(weight.codes_OI.to(device)) for weight in quantized])
    scales, outer = zip(*(e2m1_scales(weight, device) for weight in quantized), strict=True)
    scale_OG = torch.cat(scales)
    _, exponent_O = torch.frexp(scale_OG.amax(dim=1))
    scale_OG = torch.ldexp(scale_OG, -exponent_O.unsqueeze(1)) * 2.0 ** LARGEST[dtype]
    outer_O = torch.ldexp(torch.cat(outer), exponent_O - LARGEST[dtype] - UNIT[dtype])
    blocks = pack_blocks(halves_OI, [scale_OG.to(dtype)], partial(_words, dtype=dtype), gated=gated)
    n, k = halves_OI.shape
    return PackedW4(blocks, n, k, dtype, True, gated, subgroups_of(quantized[0].scheme), outer_O)


def _words(codes: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return words of codes 4 odd + j."""
    halves = codes.unflatten(-1, (2, 4))
    magnitude_at, sign_at = (torch.tensor(each, device=codes.device) for each in (MAGNITUDES[dtype], SIGNS))
    bits = ((halves & 7) << magnitude_at) + ((halves >> 3) << sign_at)
    return bits.sum(dim=-1)[..., 0] + (bits.sum(dim=-1)[..., 1] << 16)


def refusal(problem: Problem) -> str | None:
    """Refuse what `hopper.cu` refuses, and float16 for scales that are powers of two."""
    return hopper_refusal(problem) or refuse_powers(SCHEMES[problem.scheme], problem.dtype)


LINEARS = [
    register(each)
    for each in decode_kernels(
        "hopper.fp4",
        schemes=MULTIPLIED,
        fn=hopper_linear,
        repack=repack,
        refusal=refusal,
        min_sm=90,
        priority=30,
    )
]
