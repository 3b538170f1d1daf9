"""W8A8 linear of many rows of int8 in two passes: cuBLAS writes sums as int32, and a second kernel scales
them.

    y = (x_values W_codes^T - x_zero w_sum) x_scale w_scale     scaled in float32, rounded once after the bias

It serves what the linear of one pass (`prefill_int8.py`) refuses, and `scripts/bench_int8.py` compares the
two.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton_refusal, wait
from compress.kernels.linear.int8 import (
    SCHEMES,
    PackedInt8,
    int_product,
    refuse_long_sums,
    repack,
    zero_operands,
)
from compress.kernels.linear.prefill_dense16 import library_refusal
from compress.kernels.operands.rows import INT8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SPAN = 2048
"""Outputs of a program, 8 a thread."""


@jit(varying=("stride",))
def _scale(
    sums_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_zero_ptr: tl.tensor,
    w_sum_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride: tl.tensor,
    OUT: tl.constexpr,
    SPAN: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write `SPAN` outputs of a row; sums of a row begin `stride` numbers after those of the one before."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    there = outputs < OUT
    sums = tl.load(sums_ptr + row * stride + outputs, mask=there, other=0)
    w_scale = tl.load(w_scale_ptr + outputs, mask=there, other=0.0)
    if x_zero_ptr is not None:
        sums -= tl.load(x_zero_ptr + row) * tl.load(w_sum_ptr + outputs, mask=there, other=0)
    y = sums.to(tl.float32) * tl.load(x_scale_ptr + row) * w_scale
    if BIAS:
        y += tl.load(bias_ptr + outputs, mask=there, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * OUT + outputs, mask=there, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * OUT + outputs, y, mask=there)


def linear(
    x: QuantizedRows,
    packed: PackedInt8,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]."""
    assert x.values_TK.dtype == INT8, "rows of another type than the weight's"
    num_rows = x.shape[0]
    y_TO = torch.empty(num_rows, packed.n, dtype=out_dtype or packed.dtype, device=packed.codes_OI.device)
    if num_rows == 0:
        return y_TO
    sums_TO = int_product(x.values_TK, packed.codes_OI)
    _scale[num_rows, -(-packed.n // SPAN)](
        sums_TO,
        x.scale_T.contiguous(),
        packed.scale_O,
        bias_O,
        None if residual_TO is None else residual_TO.contiguous(),
        *zero_operands(x, packed),
        y_TO,
        sums_TO.stride(0),
        OUT=packed.n,
        SPAN=SPAN,
        BIAS=bias_O is not None,
        RESIDUAL=residual_TO is not None,
        num_warps=8,
        **pdl_options(y_TO.device),
    )
    return y_TO


def refusal(problem: Problem) -> str | None:
    """Return why this kernel cannot serve a problem, or None."""
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"gives 16 bits, and the model is {problem.dtype}"
    return library_refusal(problem) or triton_refusal(problem) or refuse_long_sums(problem)


register(Kernel("linear", "int8.cublas", min_sm=80, priority=9, supports=refusal, fn=linear, repack=repack))
