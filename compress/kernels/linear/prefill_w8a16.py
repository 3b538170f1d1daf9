"""W8A16 linear of many rows on Hopper: the weight is dequantized once, from the bytes that decode rows read
(`prefill_widened.py`)."""

from compress.kernels.linear import w8a16
from compress.kernels.linear.hopper import refusal as hopper_refusal
from compress.kernels.linear.prefill_widened import linear, refusal
from compress.kernels.operands.matrices import BLOCK
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register


def _refusal(problem: Problem) -> str | None:
    if problem.k % BLOCK:
        return f"K = {problem.k} is no multiple of {BLOCK}"
    return hopper_refusal(problem) or refusal(problem, given="w8")


register(
    Kernel(
        "linear",
        "hopper.w8a16.dequantize",
        min_sm=90,
        priority=10,
        supports=_refusal,
        fn=linear,
        repack=w8a16.repack,
    )
)
