"""RMSNorm with a gradient on a CPU: the formula's bits forward, gradients against float64 and autograd's."""

import pytest
import torch
from torch import Tensor

from compress.models.norms import Norm

CASES = [
    ((2, 37, 96), torch.bfloat16, torch.bfloat16),
    ((1, 19, 4, 24), torch.bfloat16, torch.bfloat16),
    ((3, 40), torch.float32, torch.float32),
    ((1, 21, 64), torch.bfloat16, torch.float32),
    ((1, 21, 64), torch.float16, torch.float16),
]


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("shape", "dtype", "weight_dtype"), CASES)
def test_bits_of_the_formula_and_gradients_as_near_to_float64_as_autograds(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    norm = Norm(shape[-1], 1e-5).to(weight_dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(shape[-1], generator=generator))
    wanted = [x, norm.weight]
    out = norm(x)
    plain = formula(x, norm.weight, 1e-5)
    assert out.dtype == plain.dtype
    assert torch.equal(out, plain)
    g = torch.randn(shape, generator=generator).to(out.dtype)
    wide = [each.detach().double().requires_grad_() for each in wanted]
    exact = torch.autograd.grad(formula(wide[0], wide[1], 1e-5), wide, g.double())
    found = torch.autograd.grad(out, wanted, g)
    autograds = torch.autograd.grad(plain, wanted, g)
    for each, theirs, right, of in zip(found, autograds, exact, wanted, strict=True):
        assert (each.dtype, each.shape) == (of.dtype, of.shape)
        assert error(each, right) <= 1.5 * error(theirs, right)
    with torch.no_grad():
        assert torch.equal(norm(x), plain)


def test_an_input_alone_and_a_weight_alone_have_the_gradients_that_they_have_together() -> None:
    norm = Norm(16, 1e-6)
    x = torch.randn(5, 16)
    g = torch.randn(5, 16)
    of_x, of_weight = torch.autograd.grad(norm(x.requires_grad_()), [x, norm.weight], g)
    assert torch.equal(of_weight, torch.autograd.grad(norm(x.detach()), norm.weight, g)[0])
    norm.requires_grad_(False)
    assert torch.equal(of_x, torch.autograd.grad(norm(x), x, g)[0])


def test_a_compiled_step_holds_the_formula() -> None:
    norm = Norm(16, 1e-6)
    x = torch.randn(5, 16, requires_grad=True)
    g = torch.randn(5, 16)
    wanted = [x, norm.weight]
    found = torch.autograd.grad(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), wanted, g)
    assert all(
        torch.allclose(each, right, rtol=1e-5, atol=1e-6)
        for each, right in zip(
            found, torch.autograd.grad(formula(x, norm.weight, 1e-6), wanted, g), strict=True
        )
    )
