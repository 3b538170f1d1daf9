"""Decode linears of int8 weights and int8 activations (W8A8) on Hopper: a scale for each output row and for
each token, and where rows are asymmetric a zero point for each token.

`hopper.cu` multiplies int8 directly and adds in int32, so every plan gives the bits of the reference
(`int8.py`), but for a bias, which is added before the result is rounded. Other devices multiply in slices
(`slices.py`).
"""

from compress.kernels.linear.decode_kernels import decode_kernels, for_packed
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.linear.int8 import ASYMMETRIC, refuse_long_sums, repack
from compress.kernels.problem import Problem
from compress.kernels.select import register

hopper_linear = for_packed(multiply)


def _refusal(problem: Problem) -> str | None:
    return refuse_long_sums(problem) or refusal(problem)


for _name, _schemes in (
    ("hopper.int8", ("INT8_DYNAMIC",)),  # rounds raw rows itself
    ("hopper.int8.given", ("INT8_STATIC", *ASYMMETRIC)),
):
    for _kernel in decode_kernels(
        _name,
        schemes=_schemes,
        fn=hopper_linear,
        repack=repack,
        refusal=_refusal,
        min_sm=90,
        priority=30,
        prepares=_name == "hopper.int8",
    ):
        register(_kernel)
