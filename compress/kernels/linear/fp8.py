"""Decode linears of e4m3 weights and e4m3 activations (W8A8): a scale for each output row, and for each
token or all of them.

On Hopper `hopper.cu` multiplies e4m3 directly. On other devices, and in `linear`, `stream.cu` converts
both operands to float16 in registers, exactly (an e4m3 number is a float16 with fewer bits), and
multiplies them as float16 with float32 sums. The two agree within the 14 bits that Hopper's FP8
instruction keeps of a sum of 128 terms, not bit for bit; a device decodes and verifies with one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.linear.coded import coded, stacked_codes, stacked_scales
from compress.kernels.linear.decode_kernels import decode_kernels, for_packed, refuse_partial_tile
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.linear.stream import stream
from compress.kernels.select import register
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class PackedFp8:
    """The values of an e4m3 weight [O, I] and its float32 scale [O]; `dtype` is the model's. Scales of the
    input come with the rows."""

    values: Tensor
    scale_O: Tensor
    dtype: torch.dtype

    @property
    def kernel_weight(self) -> KernelWeight:
        return KernelWeight("fp8", self.values, self.values.shape[0], self.values.shape[1], self.scale_O)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedFp8:
    """Stack weights along O; `gated` changes nothing, because the kernel pairs rows by their addresses."""
    quantized = coded(weights)
    return PackedFp8(stacked_codes(quantized, device), stacked_scales(quantized, device).flatten(), dtype)


linear = for_packed(stream)
hopper_linear = for_packed(multiply)

SCHEMES = ("FP8_DYNAMIC", "FP8_STATIC")
for _kernel in (
    *decode_kernels("stream.fp8", schemes=SCHEMES, fn=linear, repack=repack, refusal=refuse_partial_tile),
    *decode_kernels(
        "hopper.fp8",
        schemes=SCHEMES,
        fn=hopper_linear,
        repack=repack,
        refusal=refusal,
        min_sm=90,
        priority=30,
    ),
):
    register(_kernel)
