"""A linear of each head in Triton, for few rows: the time is that of reading the matrices.

    y[t, h] = W[h] x[t, h],   float32 sums in one order, tiles of 16 rows for every T

Shapes: T rows, H heads, I inputs and O outputs of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.select import Kernel, register
from compress.models.weights import dense
from compress.quant.scheme import QuantizedWeight

ROWS = 16
OUTPUTS = 64
INPUTS = 64


@jit(varying=("num_rows",))
def _head_linear(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    H: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    head = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * ROW_STRIDE + head * HEAD_STRIDE + inputs[None, :]
    w_at = w_ptr + (head * WIDTH + outputs)[:, None] * DEPTH + inputs[None, :]
    real_row = (rows < num_rows)[:, None]
    real_output = (outputs < WIDTH)[:, None]
    wait(PDL)
    y = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, DEPTH, INPUTS, num_stages=3):
        real = (start + inputs < DEPTH)[None, :]
        x = tl.load(x_at + start, mask=real_row & real, other=0.0)
        w = tl.load(w_at + start, mask=real_output & real, other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
    y_at = y_ptr + (rows.to(tl.int64)[:, None] * H + head) * WIDTH + outputs[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=real_row & (outputs < WIDTH)[None, :])


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> Tensor:
    """Return the matrices of all heads [H, O, I]."""
    assert not gated
    return torch.stack([dense(each).to(device=device, dtype=dtype) for each in weights])


def head_linear(x_THI: Tensor, w_HOI: Tensor) -> Tensor:
    """Return [T, H, O]; x may be columns of wider heads."""
    (num_rows, num_heads, num_inputs) = x_THI.shape
    num_outputs = w_HOI.shape[1]
    assert x_THI.stride(2) == 1
    y_THO = x_THI.new_empty(num_rows, num_heads, num_outputs)
    if num_rows:
        _head_linear[(triton.cdiv(num_outputs, OUTPUTS), num_heads, triton.cdiv(num_rows, ROWS))](
            x_THI,
            w_HOI,
            y_THO,
            num_rows,
            ROW_STRIDE=x_THI.stride(0),
            HEAD_STRIDE=x_THI.stride(1),
            H=num_heads,
            DEPTH=num_inputs,
            WIDTH=num_outputs,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            PRECISION="ieee" if x_THI.dtype == torch.float32 else "tf32",
            num_warps=4,
            **pdl_options(x_THI.device),
        )
    return y_THO


register(
    Kernel(
        "head_linear",
        "triton.tile",
        min_sm=80,
        priority=10,
        supports=triton_refusal,
        fn=head_linear,
        repack=repack,
    )
)
