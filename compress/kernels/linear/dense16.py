"""Decode linears of bfloat16 or float16 weights, kept as they are: one tensor [O, I], which prefill
multiplies by too. Hopper has `hopper.cu`, other devices `stream.cu`.

A library's GEMM does not serve: it splits K by M, so that a row's bits would depend on how many rows are
decoded with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels.linear.decode_kernels import decode_kernels, refuse_partial_tile
from compress.kernels.linear.hopper import multiply, refusal
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


def _of_tensor(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a linear of a weight [O, I] as it is, computed by `stream` or `multiply`."""

    def linear(
        x: Tensor | RawRows, w_OI: Tensor, bias_O: Tensor | None, *, activation: str | None, **epilogue: Any
    ) -> Tensor:
        weight = KernelWeight("dense16", w_OI, w_OI.shape[0], w_OI.shape[1])
        return product(x, weight, bias_O, dtype=w_OI.dtype, activation=activation, **epilogue)

    return linear


linear = _of_tensor(stream)
hopper_linear = _of_tensor(multiply)


def _refusal(problem: Problem) -> str | None:
    if problem.scheme != DENSE_SCHEMES[problem.dtype]:
        return f"the weight is {problem.scheme} and the model is not"
    return refuse_partial_tile(problem)


def _hopper_refusal(problem: Problem) -> str | None:
    return refusal(problem) or _refusal(problem)


SCHEMES = ("BF16", "F16")
LINEARS = [
    register(each)
    for each in (
        *decode_kernels("stream.dense16", schemes=SCHEMES, fn=linear, repack=repack, refusal=_refusal),
        *decode_kernels(
            "hopper.dense16",
            schemes=SCHEMES,
            fn=hopper_linear,
            repack=repack,
            refusal=_hopper_refusal,
            min_sm=90,
            priority=30,
        ),
    )
]
