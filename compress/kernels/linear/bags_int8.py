"""Decode linear of int8 weights and int8 rows on a CPU whose integer product is wrong (`int8.py`): the exact
sums by PyTorch's bags of quantized embeddings.

    y = (x_values W_codes^T) x_scale w_scale      as `int8.py`, bit for bit

A bag adds at most 512 products of two 8-bit codes, in float32: every number on its way is an integer below
2^24, so the sum is exact, also of codes of rows less a zero point, which reach 255. Bags are added as
integers. `int8.py` serves prompts there, from codes of its own.
"""

import torch
from torch import Tensor

from compress.kernels.linear import int8
from compress.kernels.linear.bags import bag_rows, bags_of, table_refusal
from compress.kernels.linear.code_table import TABLE_COLUMNS, CodeTable, repack
from compress.kernels.linear.coded import finished
from compress.kernels.operands.rows import INT8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def linear(
    x: QuantizedRows,
    packed: CodeTable,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T [T, O], every row by calls of its own."""
    assert x.values_TK.dtype == INT8, "rows of another type than the weight's"
    num_blocks = packed.scale_BGC.shape[0]
    sums = bags_of(packed, bag_rows(packed.in_features, 1))
    values_TI = x.values_TK.to(torch.float32)
    if x.zero_T is not None:
        values_TI = values_TI - x.zero_T.unsqueeze(1)
    product_TBC = torch.empty(len(values_TI), num_blocks, TABLE_COLUMNS, dtype=torch.int32)
    for x_I, product_BC in zip(values_TI, product_TBC, strict=True):
        torch.sum(sums(x_I).to(torch.int32), dim=1, dtype=torch.int32, out=product_BC)
    scale_O = packed.scale_BGC.flatten().to(torch.float32)
    y_TO = product_TBC.flatten(1).to(torch.float32) * x.scale_T.unsqueeze(1) * scale_O
    dtype = packed.dtype if out_dtype is None else out_dtype
    return finished(y_TO[:, : packed.out_features], dtype, bias_O, residual_TO)


def refusal(problem: Problem) -> str | None:
    if not problem.row_invariant:
        return "for decode rows"
    if problem.device == "cpu" and int8.has_exact_int8():
        return "PyTorch's integer product is exact on this CPU"
    return table_refusal(problem, int8.SCHEMES) or int8.refusal(problem)


register(Kernel("linear", "bags.int8", min_sm=0, priority=2, supports=refusal, fn=linear, repack=repack))
