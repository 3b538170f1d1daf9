"""Attention whose gradients have the same bits in every run on a GPU.

PyTorch's kernels of attention add up the gradients of queries with atomics, in an order that no two runs
share, unless deterministic algorithms are asked for, and cuDNN's do so in any case: a run that is killed and
resumed would end with another model. The backward of attention alone asks for them here. If a whole step
did, PyTorch would refuse the products of cuBLAS, which are the same in every run. Compiled models have
PyTorch's gradients.

Shapes: B batch, S queries, P keys, H heads, K kv heads, C head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = tuple[Tensor, Tensor, Tensor]
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The kernels that can be deterministic. MATH, which is products and a softmax, always is."""


def attend(
    q_BHSC: Tensor,
    k_BKPC: Tensor,
    v_BKPC: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention [B, H, S, C], causal where no mask, bool [..., S, P], has what a query sees."""
    facts: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scale}
    grouped = q_BHSC.shape[1] != k_BKPC.shape[1]
    inputs = (q_BHSC, k_BKPC, v_BKPC)
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if not (q_BHSC.is_cuda and trains) or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(*inputs, **facts, enable_gqa=grouped)
    if grouped and mask is not None:  # the kernel that takes masks does not share keys
        repeats = q_BHSC.shape[1] // k_BKPC.shape[1]
        k_BHPC, v_BHPC = (each.repeat_interleave(repeats, dim=1) for each in (k_BKPC, v_BKPC))
        inputs = (q_BHSC, k_BHPC, v_BHPC)
        grouped = False
    facts["enable_gqa"] = grouped
    out: Tensor = _Repeatable.apply(*_in_one_dtype(inputs), facts)  # type: ignore[no-untyped-call]
    return out


def _in_one_dtype(inputs: Inputs) -> Inputs:
    """Return the inputs as autocast would give them to attention, which is not asked inside."""
    if not torch.is_autocast_enabled("cuda"):
        return inputs
    q, k, v = (each.to(torch.get_autocast_dtype("cuda")) for each in inputs)
    return q, k, v


class _Repeatable(torch.autograd.Function):
    """Attention whose backward computes it once more, with deterministic algorithms for its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, facts: dict[str, Any]) -> Tensor:
        """Return attention."""
        ctx.save_for_backward(q, k, v)
        ctx.facts = facts
        return _attended((q, k, v), facts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q, k, v = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        inputs = (q, k, v)
        with torch.enable_grad():
            out = _attended(inputs, ctx.facts)
        with _deterministic() if _is_fused(inputs, ctx.facts) else nullcontext():
            return (*torch.autograd.grad(out, inputs, grads[0]), None)


def _attended(inputs: Inputs, facts: dict[str, Any]) -> Tensor:
    with torch.autocast("cuda", enabled=False), sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(*inputs, **facts)


def _is_fused(inputs: Inputs, facts: dict[str, Any]) -> bool:
    """Return whether one of the fused kernels serves; products refuse deterministic algorithms."""
    given = torch.backends.cuda.SDPAParams(
        *inputs, facts["attn_mask"], 0.0, facts["is_causal"], facts["enable_gqa"]
    )
    return torch.backends.cuda.can_use_flash_attention(
        given
    ) or torch.backends.cuda.can_use_efficient_attention(given)


@contextmanager
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills
