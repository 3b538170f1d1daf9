"""Gradients of attention on a GPU are the same in every run, and those of products and softmax within
rounding."""

import pytest
import torch
from torch import Tensor

from compress.models import repeatable

pytestmark = pytest.mark.gpu
RUNS = 8


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize(("length", "head_dim"), [(2048, 128), (509, 40), (700, 320)])
def test_gradients_are_the_same_in_every_run(
    length: int, head_dim: int, num_kv_heads: int, masked: bool, dtype: torch.dtype
) -> None:
    num_keys = 2 * length if masked else length
    of_keys = (1, num_kv_heads, num_keys, head_dim)
    shapes = ((1, 8, length, head_dim), of_keys, of_keys)
    q, k, v = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    grad = randn(*q.shape, seed=3, dtype=dtype)
    mask = None
    if masked:
        ones = torch.ones(length, num_keys, dtype=torch.bool, device="cuda")
        mask = ones.tril() & ones.triu(-200)

    def gradients(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = tuple(each.clone().requires_grad_() for each in inputs)
        out = repeatable.attend(*inputs, mask=mask, scale=0.11)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype)))

    first = gradients((q, k, v))
    for _ in range(RUNS):
        assert all(torch.equal(*pair) for pair in zip(gradients((q, k, v)), first, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
    q, k, v = (each.to(torch.float64).requires_grad_() for each in (q, k, v))
    repeats = 8 // num_kv_heads
    scores = q @ k.repeat_interleave(repeats, 1).transpose(2, 3) * 0.11
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if mask is None else mask
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(repeats, 1)
    expected = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double()))
    limit = 0.02 if dtype == torch.bfloat16 else 1e-4
    for found, exact in zip(first, expected, strict=True):
        assert float((found.double() - exact).norm() / exact.norm()) < limit


def test_autocast_decides_the_dtype_of_attention() -> None:
    q, k, v = (randn(1, 4, 300, 64, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = repeatable.attend(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32
