"""W4A8 linear of many rows on Hopper: `hopper.cu` turns four-bit codes into e4m3 on the way to the FP8 tensor
cores, once for 128 rows, and scales the sum of each group in float32.

The packed blocks are those of `w4a8.py`.
"""

import torch
from torch import Tensor

from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.linear.hopper_plan import prompt_plan
from compress.kernels.linear.w4a8 import SCHEMES, PackedW4A8, repack
from compress.kernels.linear.w4a16 import TILE
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def linear(
    x: QuantizedRows,
    packed: PackedW4A8,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O], gate before up."""
    weight = packed.kernel_weight
    shape = weight.shape(gated=packed.gated)
    num_rows = x.shape[0]
    return multiply(
        x,
        weight,
        bias_O,
        dtype=packed.dtype,
        activation=None,
        residual_TO=residual_TO,
        out_dtype=out_dtype,
        chosen=prompt_plan(shape, max(num_rows, 1), gpu_of(packed.blocks.device)),
    )


def _refusal(problem: Problem) -> str | None:
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 or float16"
    if problem.row_invariant:
        return "a row's bits depend on the number of rows"
    if problem.activation is not None:
        return "applies no activation"
    if problem.n % (2 * TILE) or problem.k % 128:
        return f"N = {problem.n} is no multiple of {2 * TILE}, or K = {problem.k} of 128"
    return refusal(problem)


register(
    Kernel(
        "linear", "hopper.w4a8.prompts", min_sm=90, priority=10, supports=_refusal, fn=linear, repack=repack
    )
)
