"""W8A8 linear of many rows with scales of blocks: the FP8 tensor cores by cuBLAS, which scales each product
of 128 columns in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3), from CUDA 12.9 on.

    y = sum_g (x_values[:, g] W_values[:, g]^T) x_scale[:, g] w_scale[:, g]        groups g of 128 columns

cuBLAS wants the scales of x as [G, T] in memory, T a multiple of 4. It takes those of the weight a block of
128 x 128 each where whole blocks lie in each weight and groups come in fours, else one for each output. On an
H200 a weight of 28672 x 4096 over 2,048 rows takes 379 us by blocks and 523 us by outputs, where Triton's
product (`general.py`) takes 1,163 us; errors against float64 are the rounding of the result in all three.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.linear.blocks import Blocks, repack
from compress.kernels.linear.prefill_dense16 import library_refusal
from compress.kernels.operands.rows import FP8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

ROWS = 4
"""Divisor of T: cuBLAS reads the scales of a group four rows at a time."""
GROUPS = 4
"""Divisor of G for scales of blocks: cuBLAS reads the scales of a weight's row of blocks four at a time, and
torch before 2.10 does not check it and computes wrong sums (pytorch pull request 166752)."""
OUTPUTS = 16
FIRST_CUDA = (12, 9)


def linear(
    x: QuantizedRows,
    packed: Blocks,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]."""
    num_rows, num_groups = x.scale_T.shape
    values_TK = x.values_TK
    scale_TG = x.scale_T
    if missing := -num_rows % ROWS:
        values_TK = F.pad(values_TK.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        scale_TG = F.pad(scale_TG, (0, 0, 0, missing))
    scale_GO = packed.scale_KO
    if packed.scale_blocks is not None and num_groups % GROUPS == 0:
        scale_GO = packed.scale_blocks.t()
    assert scale_GO is not None
    y_TO = torch._scaled_mm(
        values_TK,
        packed.matrices.data.squeeze(0).view(FP8).t(),
        scale_a=scale_TG.t().contiguous().t(),
        scale_b=scale_GO,
        out_dtype=packed.dtype if out_dtype is None else out_dtype,
    )[:num_rows]
    y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
    return y_TO if residual_TO is None else y_TO.add_(residual_TO)


def refusal(problem: Problem) -> str | None:
    if problem.scheme != "FP8_BLOCK":
        return "for FP8_BLOCK"
    if problem.dtype != torch.bfloat16:
        return f"gives bfloat16 or float32, and the model is {problem.dtype}"
    if problem.n % OUTPUTS or problem.k % 128:
        return f"N = {problem.n} is no multiple of {OUTPUTS}, or K = {problem.k} of 128"
    if problem.sm != 90:
        return "for sm_90, whose tensor cores cuBLAS scales blocks for"
    if tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) < FIRST_CUDA:
        return f"cuBLAS scales blocks from CUDA 12.9 on, and torch was built for {torch.version.cuda}"
    return library_refusal(problem)


register(
    Kernel("linear", "fp8_block.cublas", min_sm=90, priority=10, supports=refusal, fn=linear, repack=repack)
)
