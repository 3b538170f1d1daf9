"""W4A8 linear where no kernel multiplies four-bit codes in FP8: e4m3 rows as 16-bit numbers, which they are
exactly, by the kernels of W4A16, and their scales applied to the float32 result.

    y = x_scale (x_values W^T)

It has the speed of W4A16, not that of FP8.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.kernels.linear import prefill_w4a16
from compress.kernels.linear.coded import finished
from compress.kernels.linear.decode_kernels import MAX_ROWS, MIN_SM, for_packed
from compress.kernels.linear.stream import stream
from compress.kernels.linear.w4a8 import SCHEMES
from compress.kernels.linear.w4a16 import BLOCK, PackedW4, repack
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def linear(
    x: QuantizedRows,
    packed: PackedW4,
    bias_O: Tensor | None,
    *,
    product: Callable[..., Tensor],
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]."""
    y_TO = product(x.values_TK.to(packed.dtype), packed, None, out_dtype=torch.float32)
    y_TO *= x.scale_T.unsqueeze(1)
    return finished(y_TO, packed.dtype if out_dtype is None else out_dtype, bias_O, residual_TO)


def _refusal(problem: Problem, *, decode: bool) -> str | None:
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    if problem.row_invariant != decode:
        return "for decode rows" if decode else "a row's bits depend on the number of rows"
    if problem.activation is not None:
        return "applies no activation"
    if decode:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return "computes in bfloat16 or float16"
        if problem.m_max > MAX_ROWS:
            return f"for M up to {MAX_ROWS}, where weight bytes are the bound"
        return f"K = {problem.k} is no multiple of {BLOCK}" if problem.k % BLOCK else None
    return prefill_w4a16.refusal(replace(problem, scheme="W4A16_G128"))


for _name, _decode, _product in (
    ("stream.w4a8.widened", True, partial(for_packed(stream), activation=None)),
    ("w4a8.widened", False, prefill_w4a16.linear),
):
    register(
        Kernel(
            "linear",
            _name,
            min_sm=MIN_SM,
            priority=5,
            supports=partial(_refusal, decode=_decode),
            fn=partial(linear, product=_product),
            repack=repack,
        )
    )
