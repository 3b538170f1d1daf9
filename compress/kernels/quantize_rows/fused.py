"""Quantization of rows to the grid of e4m3 or int8 in one pass, with a scale for a row or, of e4m3, for each
group of its columns; and the end of every row kernel: its result is stored as it is, or quantized on the way
out.

    scale = max(absmax(x) / largest, tiny),  value = round(x / scale)    quotients rounded as in IEEE 754
    asymmetric int8: scale = max((most - least) / 255, tiny),  value = round(x / scale) + zero point

`operands/rows.py` has the definition. One program holds one whole row in registers, and its shape follows
from the size of a row alone: a row's bits depend on nothing but the row. Rounding to e4m3 (half to even)
is one instruction from sm_89 on; elsewhere integer arithmetic gives the same codes. Rounding to int8 is
the addition of a number so large that its last bit is 1.

Shapes: T rows, K features.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.operands.e4m3 import converts_e4m3, e4m3, e4m3_float16, group_scale, larger, quotient
from compress.kernels.operands.rows import FP8, INT8, ActivationQuant, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES

MAX_ROW_SIZE = 65536
"""Elements that a program of 1024 threads keeps in registers."""


def row_refusal(problem: Problem) -> str | None:
    """Refuse a problem that a kernel with one row of `problem.n` elements in a program cannot serve."""
    if refusal := triton_refusal(problem):
        return refusal
    return f"holds a row in registers, at most {MAX_ROW_SIZE} elements" if problem.n > MAX_ROW_SIZE else None


@functools.cache
def row_options(size: int, device: torch.device) -> dict[str, Any]:
    """Launch options of a program that holds a row: 16 elements a thread, one warp to 32."""
    block = 1 << max(size - 1, 1).bit_length()
    return {"SIZE": size, "BLOCK": block, "num_warps": min(max(block // 512, 1), 32), **pdl_options(device)}


def _refusal(problem: Problem) -> str | None:
    """Return why rows of a problem's scheme are not quantized here, None where they are."""
    scheme = SCHEMES.get(problem.scheme)
    if scheme is not None and scheme.scale_type is not None:
        return "its scales are float32 numbers, not bytes"
    return row_refusal(problem)


def row_output(
    num_rows: int, size: int, dtype: torch.dtype, device: torch.device, quant: ActivationQuant | None
) -> tuple[Tensor | QuantizedRows, dict[str, Any]]:
    """Return fresh rows [T, K], with one scale each or one for each group, and the keyword arguments by which
    `store_row` fills them. `QUANT`: 0 none, 1 dynamic, 2 static, 3 dynamic int8, 4 dynamic by `GROUP`, 5
    static int8, 6 dynamic asymmetric int8, 7 static asymmetric int8."""
    if quant is None:
        out = torch.empty(num_rows, size, dtype=dtype, device=device)
        nothing = {"scale_ptr": out, "static_ptr": out, "zero_ptr": None, "static_zero_ptr": None}
        return out, {"out_ptr": out, **nothing, "QUANT": 0, "GROUP": 0, "CONVERTS": False}
    group_size = quant.group_size or 0
    assert group_size == 0 or quant.dtype == FP8, "groups of columns are quantized to e4m3"
    assert quant.scale_type is None, "scales of one byte are found by another kernel"
    assert group_size == 0 or size % group_size == 0, f"{size} features are no whole groups of {group_size}"
    values = torch.empty(num_rows, size, dtype=torch.uint8, device=device)
    shape = (num_rows, size // group_size) if group_size else (num_rows,)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    static = scale if quant.static_scale is None else quant.static_scale
    zero = None if quant.symmetric else torch.empty(num_rows, dtype=torch.int32, device=device)
    return QuantizedRows(values.view(quant.dtype), scale, zero), {
        "out_ptr": values,
        "scale_ptr": scale,
        "static_ptr": static,
        "zero_ptr": zero,
        "static_zero_ptr": quant.static_zero,
        "QUANT": 4 if group_size else _how(quant),
        "GROUP": group_size,
        "CONVERTS": converts_e4m3(device),
    }


def _how(quant: ActivationQuant) -> int:
    """Return `QUANT` of rows whose columns have one scale."""
    is_static = quant.static_scale is not None
    if quant.dtype == FP8:
        return 2 if is_static else 1
    if quant.symmetric:
        return 5 if is_static else 3
    return 7 if is_static else 6


@jit()
def store_row(
    y: tl.tensor,
    row: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> None:
    """Row y [BLOCK], already rounded to the model's dtype, zero beyond SIZE."""
    columns = tl.arange(0, BLOCK)
    out_ptr += row.to(tl.int64) * SIZE + columns
    if QUANT == 0:
        tl.store(out_ptr, y, mask=columns < SIZE)
    elif QUANT == 4:
        GROUPS: tl.constexpr = BLOCK // GROUP
        groups = tl.arange(0, GROUPS)
        parts = tl.reshape(y.to(tl.float32), [GROUPS, GROUP])
        scale = group_scale(parts)
        codes = e4m3(parts, scale[:, None], CONVERTS, BOUNDED=True)
        tl.store(out_ptr, tl.reshape(codes, [BLOCK]), mask=columns < SIZE)
        tl.store(scale_ptr + row.to(tl.int64) * (SIZE // GROUP) + groups, scale, mask=groups < SIZE // GROUP)
    elif QUANT >= 5:
        y = y.to(tl.float32)
        if QUANT == 6:
            depth = tl.reduce(larger(-y, 0.0), 0, larger)  # less the least number
            scale = larger(tl.div_rn(tl.reduce(larger(y, 0.0), 0, larger) + depth, 255.0), 1 / (1 << 40))
            zero = nearest(tl.minimum(tl.maximum(tl.div_rn(depth, scale) - 128.0, -128.0), 127.0))
            divisor = scale
        else:
            divisor = tl.load(static_ptr)
            broken = float("nan")
            scale = tl.where(tl.reduce(tl.abs(y), 0, larger) < float("inf"), divisor, broken)
            zero = tl.load(static_zero_ptr) if QUANT == 7 else 0
        # beyond 512 steps a code saturates, whatever the zero point
        steps = nearest(tl.minimum(tl.maximum(tl.div_rn(y, divisor), -512.0), 512.0))
        code = tl.minimum(tl.maximum(steps + zero, -128), 127)
        tl.store(out_ptr, code.to(tl.uint8), mask=columns < SIZE)
        tl.store(scale_ptr + row, scale)
        if QUANT != 5:
            tl.store(zero_ptr + row, zero)
    else:
        y = y.to(tl.float32)
        if QUANT == 2:
            scale = tl.load(static_ptr)
        else:
            largest = 448.0 if QUANT == 1 else 127.0  # FP8_MAX, INT8_MAX
            scale = larger(tl.div_rn(tl.reduce(tl.abs(y), 0, larger), largest), 1 / (1 << 40))  # TINY_SCALE
        if QUANT == 3:
            tl.store(out_ptr, int8(y, scale), mask=columns < SIZE)
        else:
            tl.store(out_ptr, e4m3(y, scale, CONVERTS, BOUNDED=QUANT == 1), mask=columns < SIZE)
        tl.store(scale_ptr + row, scale)


@jit()
def nearest(x: tl.tensor) -> tl.tensor:
    """Return the integers nearest to x, ties to even, |x| below 2^22, as int32."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@jit()
def int8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return codes of x / scale as bytes, both in float32, |x / scale| at most 127 but for its rounding; the
    last bit of 1.5 * 2^23 is 1."""
    number = quotient(x, scale) + 12582912.0
    return number.to(tl.int32, bitcast=True).to(tl.uint8)


@jit()
def _quantize_rows(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * SIZE + columns, mask=columns < SIZE, other=0.0)
    store_row(
        x, row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
        SIZE, BLOCK, QUANT, GROUP, CONVERTS,
    )  # fmt: skip


def quantize_rows(x_TK: Tensor, quant: ActivationQuant) -> Tensor | QuantizedRows:
    """Return values and scales of each row."""
    num_rows, size = x_TK.shape
    out, output = row_output(num_rows, size, x_TK.dtype, x_TK.device, quant)
    _quantize_rows[(num_rows,)](x_TK.contiguous(), **output, **row_options(size, x_TK.device))
    return out


@jit()
def _dequantize_rows(
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    out_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGERS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    codes = tl.load(values_ptr + row * SIZE + columns, mask=inside, other=0)
    numbers = codes.to(tl.float32) if INTEGERS else e4m3_float16(codes).to(tl.float32)
    if zero_ptr is not None:
        numbers -= tl.load(zero_ptr + row).to(tl.float32)
    scale = tl.load(scale_ptr + row * (SIZE // GROUP) + columns // GROUP, mask=inside, other=0.0)
    numbers *= scale
    numbers = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    tl.store(out_ptr + row * SIZE + columns, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_rows(rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """Return codes times scales in `dtype`, [T, K], with the bits of `QuantizedRows.dequantize`; numbers that
    rounding took beyond the largest of `dtype` are that one."""
    values_TK = rows.values_TK.contiguous()
    num_rows, size = values_TK.shape
    integers = values_TK.dtype == INT8
    out_TK = torch.empty(num_rows, size, dtype=dtype, device=values_TK.device)
    _dequantize_rows[(num_rows,)](
        values_TK if integers else values_TK.view(torch.uint8),
        rows.scale_T.contiguous(),
        rows.zero_T,
        out_TK,
        GROUP=size // (rows.scale_T.shape[1] if rows.scale_T.dim() == 2 else 1),
        INTEGERS=integers,
        LARGEST=torch.finfo(dtype).max,
        **row_options(size, values_TK.device),
    )
    return out_TK


register(Kernel("quantize_rows", "triton.row", min_sm=80, priority=10, supports=_refusal, fn=quantize_rows))
