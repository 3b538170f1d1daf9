"""Decode linear of int8 weights by 16-bit rows (W8A16) on Hopper: a code is a byte until it reaches the
tensor cores.

A code is stored + 128. In bfloat16 the byte, read as a number, is 2^-133 of itself, and one multiplication
and addition make (code) 2^-6 of it, exactly; in float16 it is the lower half of the number 1024 + code + 128,
from which 1152 is subtracted. All products go into one sum, which is scaled in float32.

Packed layout: codes [O, I], whose columns are `interleaved` in every sixteen: columns 2 t, 2 t + 1, 2 t + 8
and 2 t + 9 lie side by side, so that the four bytes that a matrix load gives a thread are those that it feeds
to one m64n8k16 instruction.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compress.kernels.linear.blocks import Blocks
from compress.kernels.linear.blocks import repack as repack_blocks
from compress.kernels.linear.decode_kernels import decode_kernels, for_packed
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.select import register
from compress.quant.scheme import QuantizedWeight

SCHEMES = ("W8A16",)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> Blocks:
    """Stack weights along O and interleave their columns."""
    blocks = repack_blocks(weights, dtype=dtype, device=device, gated=gated)
    matrices = blocks.matrices
    biased = matrices.data.view(torch.uint8) ^ 128
    # Column = 16 step + 8 high + 2 t + odd.
    interleaved = biased.view(*biased.shape[:2], -1, 2, 4, 2).transpose(-3, -2).reshape(biased.shape)
    return replace(blocks, matrices=replace(matrices, data=interleaved), interleaved=True)


hopper_linear = for_packed(multiply)

for _kernel in decode_kernels(
    "hopper.w8a16",
    schemes=SCHEMES,
    fn=hopper_linear,
    repack=repack,
    refusal=refusal,
    min_sm=90,
    priority=30,
):
    register(_kernel)
