"""W8A8 linear of many rows: the FP8 tensor cores by cuBLAS, a scale for each row of x and for each row of
the weight.

    y = (x_values W_values^T) x_scale w_scale        scaled in float32, rounded once

`use_fast_accum` stays off: Hopper then adds to float32 every few products, not only at the end. Measured
on an H200 over 2,048 rows of llama-3.1-8b (4096 -> 6144, 4096, 28672; 14336 -> 4096) against float64
before the result is rounded: error 1e-4 at 1,250-1,330 TFLOP/s; with it on, 1.3e-3 at 1,360-1,440, and
2.8e-3 at 1,260 for the long sums of the last. Rounding the result to bfloat16 costs 1.7e-3.
"""

import torch
from torch import Tensor

from compress.kernels.linear.fp8 import PackedFp8, repack
from compress.kernels.linear.prefill_dense16 import library_refusal
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

MULTIPLE = 16
"""Divisor of N and K: FP8 operands of cuBLAS begin each row on 16 bytes."""


def linear(
    x: QuantizedRows,
    packed: PackedFp8,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]."""
    y_TO = torch._scaled_mm(
        x.values_TK,
        packed.values.t(),
        scale_a=x.scale_T.unsqueeze(1),
        scale_b=packed.scale_O.unsqueeze(0),
        out_dtype=packed.dtype if out_dtype is None else out_dtype,
    )
    y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
    return y_TO if residual_TO is None else y_TO.add_(residual_TO)


def refusal(problem: Problem) -> str | None:
    if problem.scheme not in ("FP8_DYNAMIC", "FP8_STATIC"):
        return "for FP8_DYNAMIC and FP8_STATIC"
    if problem.n % MULTIPLE or problem.k % MULTIPLE:
        return f"N = {problem.n} and K = {problem.k} are not multiples of {MULTIPLE}"
    return library_refusal(problem)


register(Kernel("linear", "fp8.cublas", min_sm=90, priority=10, supports=refusal, fn=linear, repack=repack))
