"""Decode linear of int4 weights in groups of 128 by e4m3 rows (W4A8) on Hopper: codes stay four bits until
they reach the FP8 tensor cores.

    y = x_scale sum_g scale[:, g] (x_values[:, g] codes[:, g]^T)        groups g of 128 columns

The least bit of an e4m3 number is 2^-9, and bytes 0 to 15 are 0 to 15 times it (arXiv 2209.05433). So a
code is a byte of its magnitude, with the sign above: no table and no multiplication. The product of a
group is that of FP8 weights, of which the instruction keeps 14 bits; it is scaled in float32.

Packed layout: blocks as in `w4a16.py`, 1024 bytes of codes and 16 scales, with other words. A 32-bit word is
the eight codes that one thread feeds to half of one m64n8k32 instruction: byte b holds rows g and g + 8 of
column 32 step + 16 half + 4 t + b (lane = 4 g + t). A code is stored as its sign s and its magnitude m: row
g has m in bits 0..2 and s in bit 7 of its byte, row g + 8 has m in bits 4..6 and s in bit 3 of the next byte
(of byte 0 after byte 3), so that it lies as row g does once the word is turned by four bits.

Three bits hold no 8. This project's W4A8 has codes from -7 on; where other programs wrote a -8, every
negative code of the linear is stored with its magnitude less one, and the kernel adds it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.linear.coded import coded, stacked_codes
from compress.kernels.linear.decode_kernels import decode_kernels, for_packed
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.linear.w4a16 import BLOCK, CODE_BYTES, TILE, row_pairs, tile_rows
from compress.kernels.select import register
from compress.quant.scheme import QuantizedWeight

SCHEMES = ("W4A8_FP8",)


@dataclass(frozen=True)
class PackedW4A8:
    """Blocks uint8 [tiles, groups, 1056 bytes] of n rows (padded to whole tiles) and k columns; `wide` where
    -8 is among the codes."""

    blocks: Tensor
    n: int
    k: int
    dtype: torch.dtype
    gated: bool
    wide: bool

    @property
    def kernel_weight(self) -> KernelWeight:
        return KernelWeight("w4a8_wide" if self.wide else "w4a8", self.blocks, self.n, self.k)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedW4A8:
    """Stack weights along O and pack them in blocks; scales are rounded to the compute dtype."""
    quantized = coded(weights)
    codes_OI = stacked_codes(quantized, device)
    scale_OG = torch.cat([weight.scale_OG.to(device) for weight in quantized]).to(dtype)
    n, k = codes_OI.shape
    rows = tile_rows(n, gated=gated).to(device)
    real = rows.flatten().clamp(max=n - 1)
    tiles = (len(rows), TILE, k // BLOCK)
    wide = bool((codes_OI == -8).any())
    codes = _code_bytes(codes_OI[real].view(*tiles, BLOCK), wide)
    blocks = torch.cat((codes, row_pairs(scale_OG[real].view(*tiles, 1))), dim=-1)
    return PackedW4A8(blocks, n, k, dtype, gated, wide)


def _code_bytes(codes: Tensor, wide: bool) -> Tensor:
    """Pack codes [tiles, 16, groups, 128] to bytes [tiles, groups, 1024]."""
    tiles, _, groups, _ = codes.shape
    # Row = 8 high_row + g; column = 64 half + 32 step + 16 high_column + 4 t + byte.
    split = codes.to(torch.int64).view(tiles, 2, 8, groups, 2, 2, 2, 4, 4)
    # Tile, group, half, g, t, step, high_column; then byte, high_row.
    ordered = split.permute(0, 3, 4, 2, 7, 5, 6, 8, 1)
    sign = (ordered < 0).to(torch.int64)
    magnitude = ordered.abs() - (sign if wide else 0)
    byte = 8 * torch.arange(4, device=codes.device)
    low = (magnitude[..., 0] << byte) + (sign[..., 0] << (byte + 7))
    high = (magnitude[..., 1] << (byte + 4)) + (sign[..., 1] << ((byte + 8) % 32 + 3))
    words = (low + high).sum(dim=-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return signed.contiguous().view(torch.uint8).view(tiles, groups, CODE_BYTES)


hopper_linear = for_packed(multiply)

for _kernel in decode_kernels(
    "hopper.w4a8",
    schemes=SCHEMES,
    fn=hopper_linear,
    repack=repack,
    refusal=refusal,
    min_sm=90,
    priority=30,
):
    register(_kernel)
