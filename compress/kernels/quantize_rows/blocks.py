"""Quantization of rows in blocks of columns whose scales are one byte, in one pass, with the bits of the
definition in `quant/block_inputs.py`. One program holds one whole row in registers.

Shapes: T rows, K columns, G blocks of a row.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.e4m3 import e4m3_float16, encode_e4m3, larger
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.quantize_rows.fused import nearest, row_options, row_refusal
from compress.kernels.select import Kernel, register
from compress.quant.block_inputs import LARGEST
from compress.quant.scheme import SCHEMES


@jit()
def _quantize_blocks(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    groups = tl.arange(0, GROUPS)
    x = tl.load(x_ptr + row * SIZE + columns, mask=columns < SIZE, other=0.0)
    parts = tl.reshape(x.to(tl.float32), [GROUPS, GROUP])
    absmax = tl.reduce(tl.abs(parts), 1, larger)
    wanted = tl.div_rn(absmax, LARGEST)
    if global_ptr is None:  # the least power of two above, from 2^-126 to 2^125
        power = (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        power = tl.minimum(tl.maximum(power, 0x00800000), 0x7E000000)
        scale = power.to(tl.float32, bitcast=True)
    else:
        factor = tl.load(global_ptr)
        scale = tl.div_rn(
            e4m3_float16(encode_e4m3(tl.minimum(wanted * factor, 448.0))).to(tl.float32), factor
        )
    scale = tl.where(absmax < float("inf"), scale, float("nan"))
    divisor = tl.broadcast_to(scale[:, None], parts.shape)
    steps = tl.where(divisor > 0.0, tl.div_rn(parts, divisor), 0.0)
    steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    if LARGEST == 6:  # e2m1 counts in halves below 2, in ones below 4, and then in twos
        size = tl.abs(steps)
        step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
        sign = (steps.to(tl.uint32, bitcast=True) >> 24) & 0x80
        codes = encode_e4m3(nearest(tl.div_rn(size, step)).to(tl.float32) * step) | sign.to(tl.uint8)
    else:
        codes = encode_e4m3(steps)
    tl.store(out_ptr + row * SIZE + columns, tl.reshape(codes, [BLOCK]), mask=columns < SIZE)
    tl.store(scale_ptr + row * (SIZE // GROUP) + groups, scale, mask=groups < SIZE // GROUP)


def quantize_blocks(x_TK: Tensor, quant: ActivationQuant) -> QuantizedRows:
    """Return codes e4m3 [T, K] and scales float32 [T, G]."""
    num_rows, size = x_TK.shape
    assert quant.group_size is not None
    assert size % quant.group_size == 0, f"{size} columns are no whole blocks of {quant.group_size}"
    values_TK = torch.empty(num_rows, size, dtype=torch.uint8, device=x_TK.device)
    scale_TG = torch.empty(num_rows, size // quant.group_size, dtype=torch.float32, device=x_TK.device)
    _quantize_blocks[(num_rows,)](
        x_TK.contiguous(),
        values_TK,
        scale_TG,
        quant.global_scale,
        GROUP=quant.group_size,
        LARGEST=LARGEST[quant.num_bits],
        **row_options(size, x_TK.device),
    )
    return QuantizedRows(values_TK.view(quant.dtype), scale_TG)


def _refusal(problem: Problem) -> str | None:
    scheme = SCHEMES.get(problem.scheme)
    if scheme is None or scheme.scale_type is None or scheme.activation is None:
        return "for inputs in blocks whose scales are one byte"
    return row_refusal(problem)


register(
    Kernel("quantize_rows", "triton.blocks", min_sm=80, priority=10, supports=_refusal, fn=quantize_blocks)
)
