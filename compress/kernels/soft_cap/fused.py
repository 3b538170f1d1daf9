"""Capped logits (arXiv 2408.00118, section 2) in one launch: c tanh(x / c), float32, each element on its own.

`capped` serves attention kernels too, whose scores have a cap.
"""

from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SPAN = 2048


@jit()
def capped(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap tanh(x / cap) of float32 numbers, with an error of some units of cap 2^-24: tanh(u) is
    1 - 2 / (1 + e^2u), which saturates at infinity too."""
    return cap - 2 * cap / (1 + tl.exp2(x * (2.8853900817779268 / cap)))  # 2 / ln 2


@jit(varying=("size",))
def _soft_cap(
    x_ptr: tl.tensor, cap: tl.tensor, size: tl.tensor, SPAN: tl.constexpr, PDL: tl.constexpr
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + at, mask=at < size)
    tl.store(x_ptr + at, capped(x, cap), mask=at < size)


def soft_cap_(logits_TV: Tensor, cap: float) -> Tensor:
    """Cap logits in place and return them."""
    assert logits_TV.is_contiguous()
    size = logits_TV.numel()
    if size:
        _soft_cap[(-(-size // SPAN),)](
            logits_TV, cap, size, SPAN=SPAN, num_warps=4, **pdl_options(logits_TV.device)
        )
    return logits_TV


def supports(problem: Problem) -> str | None:
    return triton_refusal(problem)


register(Kernel("soft_cap", "triton.elements", min_sm=80, priority=10, supports=supports, fn=soft_cap_))
