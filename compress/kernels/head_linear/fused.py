"""A linear of each head in Triton, for few rows: the time is that of reading the matrices.

    y[t, h] = W[h] x[t, h],   float32 sums in one order, tiles of 16 rows for every T

A program holds some rows of the matrix of a head, all of their numbers. They are constant, so it reads them
before it waits for the kernel ahead, and once for all tiles.

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
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.weights import dense
from compress.quant.scheme import QuantizedWeight

ROWS = 16
HELD = 32768
"""Numbers of a matrix that a program holds."""
MAX_DEPTH = 1024
PROGRAMS = 2
"""Most programs that share the tiles of rows of one part of a matrix."""


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
    inputs = tl.arange(0, INPUTS)
    real_input = (inputs < DEPTH)[None, :]
    w = tl.load(
        w_ptr + (head * WIDTH + outputs)[:, None] * DEPTH + inputs[None, :],
        mask=(outputs < WIDTH)[:, None] & real_input,
        other=0.0,
    )
    wait(PDL)
    for tile in tl.range(tl.program_id(2), tl.cdiv(num_rows, ROWS), tl.num_programs(2)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        real_row = (rows < num_rows)[:, None]
        x = tl.load(
            x_ptr + rows[:, None] * ROW_STRIDE + head * HEAD_STRIDE + inputs[None, :],
            mask=real_row & real_input,
            other=0.0,
        )
        y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
        tl.store(
            y_ptr + (rows[:, None] * H + head) * WIDTH + outputs[None, :],
            y.to(y_ptr.dtype.element_ty),
            mask=real_row & (outputs < WIDTH)[None, :],
        )


def _refusal(problem: Problem) -> str | None:
    if refusal := triton_refusal(problem):
        return refusal
    return f"holds rows of a matrix, of at most {MAX_DEPTH} inputs" if problem.k > MAX_DEPTH else None


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
    depth = max(16, triton.next_power_of_2(num_inputs))
    outputs = min(64, max(16, HELD // depth))
    if num_rows:
        _head_linear[
            (triton.cdiv(num_outputs, outputs), num_heads, min(triton.cdiv(num_rows, ROWS), PROGRAMS))
        ](
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
            OUTPUTS=outputs,
            INPUTS=depth,
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
        supports=_refusal,
        fn=head_linear,
        repack=repack,
    )
)
