"""The Hadamard transform of heads in one launch (`reference.py` has the definition and its paper), for the
outputs of attention over transformed values.

A program takes a few heads, whichever rows they belong to; a head's bits depend on that head alone.
`rope_store` transforms queries, keys and values itself.

Shapes: T rows, H heads, C head dimension.
"""

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
from compress.kernels.operands.hadamard import transformed_halves
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.quant.kv import HADAMARD_HEAD_DIMS

TILE_SIZE = 1024
"""Elements of a program, as in `rope_store`."""
NUM_WARPS = 2


@jit(varying=("num_heads",))
def _hadamard(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_heads: tl.tensor,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    there = heads < num_heads
    at = heads.to(tl.int64) * C + tl.arange(0, C // 2)[None, :]
    first = tl.load(x_ptr + at, mask=there, other=0.0)
    second = tl.load(x_ptr + at + C // 2, mask=there, other=0.0)
    first, second = transformed_halves(first, second, C, STEPS)
    tl.store(y_ptr + at, first.to(y_ptr.dtype.element_ty), mask=there)
    tl.store(y_ptr + at + C // 2, second.to(y_ptr.dtype.element_ty), mask=there)


def hadamard(x_THC: Tensor) -> Tensor:
    """Return the transform of each head, in the dtype of x."""
    x_THC = x_THC.contiguous()
    y_THC = torch.empty_like(x_THC)
    head_dim = x_THC.shape[-1]
    num_heads = x_THC.numel() // head_dim
    if num_heads:
        heads = TILE_SIZE // head_dim
        _hadamard[(-(-num_heads // heads),)](
            x_THC,
            y_THC,
            num_heads,
            C=head_dim,
            HEADS=heads,
            STEPS=steps_of(head_dim),
            num_warps=NUM_WARPS,
            **pdl_options(x_THC.device),
        )
    return y_THC


def steps_of(head_dim: int) -> int:
    """Return the steps of the transform of half a head."""
    return head_dim.bit_length() - 2


def supports(problem: Problem) -> str | None:
    if problem.n not in HADAMARD_HEAD_DIMS:
        return f"for heads of {', '.join(map(str, HADAMARD_HEAD_DIMS))}, not {problem.n}"
    return triton_refusal(problem)


register(Kernel("hadamard", "triton.heads", min_sm=80, priority=10, supports=supports, fn=hadamard))
