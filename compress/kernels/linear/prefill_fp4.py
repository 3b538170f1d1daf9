"""Linear of many rows over four-bit floats on Hopper: as of integers in the same blocks
(`prefill_w4a16.py`)."""

from compress.kernels.linear import fp4
from compress.kernels.linear.prefill_w4a16 import linear, refuse_size
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def _refusal(problem: Problem) -> str | None:
    if problem.scheme not in fp4.MULTIPLIED:
        return f"for {', '.join(fp4.MULTIPLIED)}"
    return fp4.refusal(problem) or refuse_size(problem)


LINEARS = [
    register(
        Kernel(
            "linear",
            "hopper.fp4.dequantize",
            min_sm=90,
            priority=10,
            supports=_refusal,
            fn=linear,
            repack=fp4.repack,
        )
    )
]
