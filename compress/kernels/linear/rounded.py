"""Linears of inputs in blocks whose scales are one byte, on GPUs whose tensor cores read no such blocks: rows
are rounded, become 16-bit numbers again, and are multiplied by the kernels of the same weights alone.

    y = q(x) W^T,   q(x) = round(x / scale) scale in the model's dtype

It has the speed of the weights alone, of `MXFP8` that of 16-bit weights, and shows what a model computes on a
GPU with such tensor cores.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.linear import dense16, fp4, general, prefill_dense16, prefill_fp4, slices
from compress.kernels.operands.matrices import refuse_powers
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.quantize_rows.fused import dequantize_rows
from compress.kernels.select import Kernel, Repack, register
from compress.quant.scheme import SCHEMES, QuantizedWeight

ALONE = {"NVFP4_W4A4": "NVFP4", "MXFP4_W4A4": "MXFP4", "MXFP8": None}
"""The scheme of the weights alone; None for those that are multiplied as 16-bit numbers."""


@dataclass(frozen=True)
class Rounded:
    """Weights in the layout of a kernel of the weights alone; `dtype` is the model's."""

    weights: Any
    dtype: torch.dtype


@functools.cache
def repack_of(repack: Any) -> Repack:
    """Return the repack of weights whose inputs are rounded, for the layout of another."""

    def rounded(
        weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
    ) -> Rounded:
        alone = [_alone(weight, dtype) for weight in weights]
        return Rounded(repack(alone, dtype=dtype, device=device, gated=gated), dtype)

    return rounded


def _alone(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    assert isinstance(weight, QuantizedWeight), "a dense weight among codes"
    name = ALONE[weight.scheme.name]
    if name is None:
        return weight.dequantize().to(dtype)
    return replace(weight, scheme=SCHEMES[name], input_global_scale=None)


def linear(
    x: QuantizedRows,
    packed: Rounded,
    bias_O: Tensor | None,
    *,
    product: Callable[..., Tensor],
    **epilogue: Any,
) -> Tensor:
    """Return x W^T, [T, O], with what else the `product` of the weights alone does to it."""
    return product(dequantize_rows(x, packed.dtype), packed.weights, bias_O, **epilogue)


def rounded(kernel: Kernel, *, suffix: str) -> Kernel:
    """Return the kernel of rounded rows that multiplies as one of the weights alone does."""

    def supports(problem: Problem) -> str | None:
        if problem.scheme not in ALONE:
            return f"for {', '.join(ALONE)}"
        scheme = SCHEMES[problem.scheme]
        if scheme.group_size is not None and problem.k % scheme.group_size:
            return f"K = {problem.k} is no multiple of the group size {scheme.group_size}"
        if reason := refuse_powers(scheme, problem.dtype):
            return reason
        alone = ALONE[problem.scheme] or DENSE_SCHEMES[problem.dtype]
        return kernel.supports(replace(problem, scheme=alone))

    layout: Any = kernel.repack
    return replace(
        kernel,
        name=f"{kernel.name}.{suffix}",
        supports=supports,
        fn=functools.partial(linear, product=kernel.fn),
        repack=repack_of(layout),
        prepares=False,
    )


for _kernel in (*fp4.LINEARS, *prefill_fp4.LINEARS, *slices.LINEARS["fp4"], *general.LINEARS["fp4"]):
    register(rounded(_kernel, suffix="rounded"))
for _kernel in (
    *dense16.LINEARS,
    *prefill_dense16.LINEARS,
    *slices.LINEARS["dense16"],
    *general.LINEARS["dense16"],
):
    register(rounded(_kernel, suffix="rounded.dequantized"))
