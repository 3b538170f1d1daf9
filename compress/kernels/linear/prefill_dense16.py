"""Linear of many rows in bfloat16 or float16: cuBLAS over the weight as the decode kernel keeps it,
[O, I]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.linear.dense16 import repack
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, register


def linear(
    x_TI: Tensor,
    w_OI: Tensor,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]. A wider `out_dtype` keeps the float32 sums as they are."""
    if out_dtype is None or out_dtype == x_TI.dtype:
        y_TO = F.linear(x_TI, w_OI, bias_O)
    else:
        y_TO = torch.mm(x_TI, w_OI.t(), out_dtype=out_dtype)
        y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
    return y_TO if residual_TO is None else y_TO.add_(residual_TO)


def refusal(problem: Problem) -> str | None:
    if problem.dtype not in (torch.bfloat16, torch.float16) or problem.scheme != DENSE_SCHEMES[problem.dtype]:
        return "for BF16 and F16 models"
    return library_refusal(problem)


def library_refusal(problem: Problem) -> str | None:
    """Refuse a problem that a product by cuBLAS cannot serve."""
    if problem.device != "cuda":
        return f"runs on CUDA devices and this one is {problem.device}"
    if problem.activation is not None:
        return "applies no activation"
    if problem.row_invariant:
        return "cuBLAS sums in an order that depends on M, and so would a row's bits"
    return None


LINEARS = [
    register(
        Kernel(
            "linear",
            "dense16.cublas",
            min_sm=80,
            priority=10,
            supports=refusal,
            fn=linear,
            repack=repack,
        )
    )
]
