"""Quantization of rows to e4m3 with a scale for each group of columns, as `operands/rows.py` defines it, one
row a program."""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait
from compress.kernels.operands.rows import FP8, ActivationQuant, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.quantize_rows.fused import converts_e4m3, e4m3, row_refusal
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES


@jit()
def _quantize_groups(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK)
    at = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there = (groups < GROUPS)[:, None]
    x = tl.load(x_ptr + row * (GROUPS * SIZE) + at, mask=there, other=0.0).to(tl.float32)
    scale = group_scale(x)
    tl.store(out_ptr + row * (GROUPS * SIZE) + at, e4m3(x, scale[:, None], CONVERTS), mask=there)
    tl.store(scale_ptr + row * GROUPS + groups, scale, mask=groups < GROUPS)


@jit()
def group_scale(x: tl.tensor) -> tl.tensor:
    """Return the scale of each row of float32 x; NaN if a number is."""
    most = tl.div_rn(tl.reduce(tl.abs(x), 1, _larger), 448.0)  # FP8_MAX
    return tl.maximum(most, 1 / (1 << 40), propagate_nan=tl.PropagateNan.ALL)  # TINY_SCALE


@jit()
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def quantize_groups(x_TK: Tensor, quant: ActivationQuant) -> QuantizedRows:
    """Return values and scales of each group of columns."""
    num_rows, size = x_TK.shape
    assert quant.group_size is not None
    assert quant.dtype == FP8
    groups = size // quant.group_size
    assert groups * quant.group_size == size, f"{size} features are no whole groups of {quant.group_size}"
    values = torch.empty(num_rows, size, dtype=torch.uint8, device=x_TK.device)
    scale_TG = torch.empty(num_rows, groups, dtype=torch.float32, device=x_TK.device)
    if num_rows > 0:
        block = 1 << max(groups - 1, 0).bit_length()
        _quantize_groups[(num_rows,)](
            x_TK.contiguous(),
            values,
            scale_TG,
            GROUPS=groups,
            BLOCK=block,
            SIZE=quant.group_size,
            CONVERTS=converts_e4m3(x_TK.device),
            num_warps=min(max(block * quant.group_size // 512, 1), 16),
            **pdl_options(x_TK.device),
        )
    return QuantizedRows(values.view(FP8), scale_TG)


def _refusal(problem: Problem) -> str | None:
    if problem.scheme not in SCHEMES or SCHEMES[problem.scheme].activation != "group":
        return "gives each group of a row a scale"
    return row_refusal(problem)


register(
    Kernel("quantize_rows", "triton.groups", min_sm=80, priority=10, supports=_refusal, fn=quantize_groups)
)
