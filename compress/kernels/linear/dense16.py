"""Decode linear of bfloat16 or float16 weights, kept as they are: one tensor [O, I], which prefill
multiplies by too.

A library's GEMM does not serve: it splits K by M, so that a row's bits would depend on how many rows are
decoded with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.linear.decode_kernels import decode_kernels, refuse_partial_tile
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.linear.stream import stream
from compress.kernels.operands.rows import RawRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import register
from compress.quant.scheme import QuantizedWeight


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> Tensor:
    """Stack weights [O_j, I] along O, dense; `gated` changes nothing, because the kernel pairs rows by their
    addresses."""
    dense = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    return torch.cat([weight.to(device=device, dtype=dtype) for weight in dense])


def linear(
    x: Tensor | RawRows,
    w_OI: Tensor,
    bias_O: Tensor | None,
    *,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    weight = KernelWeight("dense16", w_OI, w_OI.shape[0], w_OI.shape[1])
    return stream(
        x,
        weight,
        bias_O,
        dtype=w_OI.dtype,
        activation=activation,
        residual_TO=residual_TO,
        out_dtype=out_dtype,
    )


def _refusal(problem: Problem) -> str | None:
    if problem.scheme != DENSE_SCHEMES[problem.dtype]:
        return f"the weight is {problem.scheme} and the model is not"
    return refuse_partial_tile(problem)


for _kernel in decode_kernels(
    "stream.dense16", schemes=("BF16", "F16"), fn=linear, repack=repack, refusal=_refusal
):
    register(_kernel)
