"""Causal attention on a CPU with bfloat16 tiles: PyTorch's forward bit for bit, gradients held to float64 and
beside PyTorch's own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models import causal_gradient
from compress.models.attention import FullAttention

SHAPES = [
    (1, 200, 4, 2, 16),
    (2, 129, 6, 6, 64),
    (1, 128, 8, 1, 24),
    (3, 7, 4, 2, 32),
    (1, 1, 2, 1, 8),
    (1, 300, 16, 2, 128),
]
"""batch, tokens, heads, kv heads, head dimension"""


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic is the same without tiles, only slower."""
    monkeypatch.setattr(causal_gradient, "has_bfloat16_tiles", lambda: True)


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v as [B, S, heads, C] that want a gradient, and the gradient of the output."""
    batch, tokens, heads, kv_heads, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    found = [
        torch.randn(batch, tokens, each, size, generator=generator)
        for each in (heads, kv_heads, kv_heads, heads)
    ]
    return [(2 * x if idx == 0 else x).to(dtype).requires_grad_(idx < 3) for idx, x in enumerate(found)]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FullAttention()(0, q, k, v, window=None)


def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """By autograd through the formula in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    q64, k64, v64 = wide[0], *(x.repeat_interleave(group, 2) for x in wide[1:])
    scores = torch.einsum("bshc,bthc->bhst", q64, k64) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    out = torch.einsum("bhst,bthc->bshc", scores.masked_fill(future, -torch.inf).softmax(-1), v64)
    return torch.autograd.grad(out, wide, g.double())


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scores", [1, causal_gradient.SCORES])
def test_gradients_are_at_least_as_near_to_float64_as_pytorchs(
    shape: tuple[int, ...], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_gradient, "SCORES", scores)
    *qkv, g = tensors(shape)
    out = ours(*qkv)
    assert torch.equal(out, plain(*qkv))
    found = torch.autograd.grad(out, qkv, g)
    pytorchs = torch.autograd.grad(plain(*qkv), qkv, g)
    expected = exact(*qkv, g)
    for each, theirs, right in zip(found, pytorchs, expected, strict=True):
        assert (each.dtype, each.shape) == (torch.bfloat16, right.shape)
        if shape[1] > 1 or right.any():  # one token looks only at itself: q and k have no gradient
            assert error(each, right) <= max(1.1 * error(theirs, right), 2.0**-9)
        else:
            assert not each.any()


def test_it_is_taken_with_a_gradient_to_come_in_bfloat16_and_not_otherwise() -> None:
    def taken(q: Tensor, k: Tensor, v: Tensor) -> bool:
        before = ours(q, k, v).grad_fn
        return "_Attend" in str([before, before and before.next_functions])

    q, k, v, _ = tensors((1, 8, 2, 1, 8))
    assert taken(q, k, v)
    assert taken(q.detach(), k.detach(), v)
    assert not taken(q.detach(), k.detach(), v.detach())
    assert not taken(*(x.detach().float().requires_grad_() for x in (q, k, v)))
    with torch.no_grad():
        assert not taken(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert taken(*(x.detach().float().requires_grad_() for x in (q, k, v)))


def test_under_autocast_gradients_come_back_in_the_dtype_of_the_inputs() -> None:
    *qkv, g = tensors((2, 40, 4, 2, 16), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(*qkv)
        usual = plain(*qkv)
        assert torch.equal(out, usual)
        found = torch.autograd.grad(
            out, qkv, g.to(out.dtype)
        )  # a backward inside autocast computes as one outside
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in qkv]
    outside = torch.autograd.grad(ours(*rounded), rounded, g.to(torch.bfloat16))
    assert all(
        each.dtype == torch.float32 and torch.equal(each, right.float())
        for each, right in zip(found, outside, strict=True)
    )


def test_a_compiled_step_keeps_pytorchs_attention() -> None:
    *qkv, g = tensors((1, 16, 4, 2, 16))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*qkv), qkv, g)
    expected = torch.autograd.grad(plain(*qkv), qkv, g)
    assert all(torch.equal(each, right) for each, right in zip(found, expected, strict=True))
