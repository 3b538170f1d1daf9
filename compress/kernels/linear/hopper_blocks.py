"""Decode linears of e4m3 weights in blocks of 128 x 128 on Hopper, for e4m3 rows in groups of 128 columns
(DeepSeek-V3, arXiv 2412.19437, section 3.3).

`hopper.cu` multiplies e4m3 directly, and scales each product of 128 columns in float32 by both scales of its
block. Of such a product the instruction keeps 14 bits.
"""

from compress.kernels.linear.blocks import repack
from compress.kernels.linear.decode_kernels import decode_kernels, for_packed
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.problem import Problem
from compress.kernels.select import register

MAX_COLUMNS = 32768
"""Columns whose scales of 64 rows leave shared memory for a stage of weights."""

hopper_linear = for_packed(multiply)


def _refusal(problem: Problem) -> str | None:
    if problem.k > MAX_COLUMNS:
        return f"for K up to {MAX_COLUMNS}"
    return refusal(problem)


for _kernel in decode_kernels(
    "hopper.fp8_block",
    schemes=("FP8_BLOCK",),
    fn=hopper_linear,
    repack=repack,
    refusal=_refusal,
    min_sm=90,
    priority=30,
    prepares=False,
):
    register(_kernel)
