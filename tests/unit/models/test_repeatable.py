"""Attention with gradients that are the same in every run: they are those of products and a softmax, and
recomputed layers run twice, not once more for it. That runs agree is tested on a GPU
(`test_repeatable_gpu.py`)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compress.models import repeatable


def inputs(num_kv_heads: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 8), (2, num_kv_heads, 9, 8), (2, num_kv_heads, 9, 8))
    return tuple(torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes)


def facts(mask: Tensor | None, *, grouped: bool = False) -> dict[str, Any]:
    return {"attn_mask": mask, "is_causal": mask is None, "scale": 0.3, "enable_gqa": grouped}


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_products_and_a_softmax(masked: bool) -> None:
    q, k, v = inputs()
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen = seen & seen.T.roll(-3, 0) | torch.eye(9, dtype=torch.bool) if masked else seen
    out = repeatable._Repeatable.apply(q, k, v, facts(seen if masked else None))
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    weights = torch.arange(out.numel()).view(out.shape).cos()
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for each, exact in zip(found, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(each, exact)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_recomputed_layer_runs_twice() -> None:
    q, k, v = inputs()
    calls: list[int] = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        out: Tensor = repeatable._Repeatable.apply(q * 2, k * 2, v * 2, facts(None))
        return out

    out = checkpoint(layer, q, k, v, use_reentrant=False)
    out.sum().backward()
    assert len(calls) == 2
    assert all(each.grad is not None for each in (q, k, v))


def test_on_a_cpu_it_is_attention_of_torch() -> None:
    q, k, v = inputs(num_kv_heads=2)
    out = repeatable.attend(q, k, v, scale=0.3)
    own = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.equal(out, own)
