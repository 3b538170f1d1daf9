"""Decode linear of e4m3 weights and e4m3 activations (W8A8): a scale for each output row, and for each token or all of them.

Both operands become float16 in registers, exactly (an e4m3 number is a float16 with fewer bits), and multiply as float16 with float32
sums: every product is exact, and sums keep 24 bits, where the FP8 instruction of Hopper keeps about 14. Decode is bound by weight bytes,
so this costs no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.linear.stream import Streamed, kernels, partial_tile, stream
from compress.kernels.rows import QuantizedRows, RawRows
from compress.kernels.select import register
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class PackedFp8:
    """e4m3 values [O, I] and float32 scale [O]; `dtype` is the model's. Scales of the input come with the rows."""

    values: Tensor
    scale_O: Tensor
    dtype: torch.dtype


def repack(weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool) -> PackedFp8:
    """Stacked along O; `gated` changes nothing, the kernel pairs rows by their addresses."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    assert len(quantized) == len(weights), "a dense weight among FP8 weights"
    return PackedFp8(
        values=torch.cat([weight.codes_OI.to(device).view(torch.uint8) for weight in quantized]).view(torch.float8_e4m3fn),
        scale_O=torch.cat([weight.scale_OG.to(device=device, dtype=torch.float32).flatten() for weight in quantized]),
        dtype=dtype,
    )


def linear(
    x: QuantizedRows | RawRows,
    packed: PackedFp8,
    bias_O: Tensor | None,
    *,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    n, k = packed.values.shape
    weight = Streamed("fp8", packed.values, n, k, packed.scale_O)
    return stream(x, weight, bias_O, dtype=packed.dtype, activation=activation, residual_TO=residual_TO, out_dtype=out_dtype)


for _kernel in kernels("fp8", schemes=("FP8_DYNAMIC", "FP8_STATIC"), fn=linear, repack=repack, refusal=partial_tile):
    register(_kernel)
