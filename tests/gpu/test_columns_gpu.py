"""GPTQ and coordinate descent on a GPU, where a block of columns is one launch, against loops in torch."""

from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import InputStats, SecondMoment
from compress.kernels.columns import DescentBlock, descend_block, reference
from compress.methods.quantize.descent import Descent
from compress.methods.quantize.gptq import Gptq
from compress.quant.numerics import output_error
from compress.quant.scheme import scheme_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC"])
@pytest.mark.parametrize(("size", "num_outputs"), [(128, 256), (128, 1000), (32, 7), (100, 33)])
@pytest.mark.parametrize("refitted", [False, True])
def test_descending_a_block(name: str, size: int, num_outputs: int, refitted: bool) -> None:
    """The launch against the loop. Sums in another order may part them at a tie, and everything after it in
    the column of an output.
    """
    generator = torch.Generator().manual_seed(0)
    scheme = scheme_named(name)
    x_TB = torch.randn(4 * size, size, generator=generator)
    h_BB = x_TB.t() @ x_TB / len(x_TB)
    scale_O = (0.5 + torch.rand(num_outputs, generator=generator)) / scheme.max_code
    zero_O = None if scheme.symmetric else torch.randint(-8, 8, (num_outputs,), generator=generator).float()
    levels_BO = (
        torch.randn(size, num_outputs, generator=generator)
        .mul(scheme.max_code / 2)
        .clamp(scheme.min_code, scheme.max_code)
        .to(scheme.code_dtype)
        .float()
    )
    levels_BO -= 0 if zero_O is None else zero_O
    w_BO = (levels_BO + scheme.max_code / 8 * torch.randn(size, num_outputs, generator=generator)) * scale_O
    gradient_BO = h_BB @ (levels_BO * scale_O - w_BO)
    block = DescentBlock(levels_BO, gradient_BO, h_BB, 1 / h_BB.diagonal(), scheme, scale_O, zero_O)
    refit: dict[str, Any] = {}
    if refitted:
        refit = {"curvature_product_BO": h_BB @ levels_BO, "scale_dtype": torch.bfloat16}
    expected = reference.descend_block(block, **refit)
    found = descend_block(DescentBlock(**on_device(vars(block))), **on_device(refit))
    same_O = (found[0].cpu() == expected[0]).all(dim=0) & (found[1].cpu() == expected[1])
    assert same_O.float().mean() > 0.9
    for each, other in zip(found, expected, strict=True):
        assert bool(torch.isfinite(each).all())
        torch.testing.assert_close(each.cpu()[..., same_O], other[..., same_O], rtol=1e-4, atol=1e-5)


def on_device(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in operands.items()}


def errors_on(device: str, name: str) -> tuple[float, float]:
    """Output error after GPTQ, and after descent on it, of one linear whose inputs are correlated."""
    generator = torch.Generator().manual_seed(0)
    w_OI = torch.randn(200, 384, generator=generator)
    x_TI = torch.randn(1024, 384, generator=generator) @ (
        torch.eye(384) + 0.3 * torch.randn(384, 384, generator=generator)
    )
    moment = SecondMoment()
    moment.update(x_TI.to(device))
    w_OI = w_OI.to(device)
    stats = InputStats(moment)
    scheme = scheme_named(name)
    rounded = Gptq().round(w_OI, stats, scheme, scale_dtype=torch.bfloat16).weight
    refined = Descent().refine(w_OI, rounded, stats).weight
    both = [output_error(w_OI, each.dequantize(torch.float32), moment.mean()) for each in (rounded, refined)]
    return both[0], both[1]


def coupled_loss_on(device: str) -> float:
    """What coupled rounds leave of the loss of rows whose errors add up."""
    generator = torch.Generator().manual_seed(1)
    w_OI = torch.randn(200, 384, generator=generator)
    few = torch.randn(4, 200, generator=generator)
    moment = SecondMoment()
    moment.update(
        (torch.randn(1024, 384, generator=generator) @ torch.randn(384, 384, generator=generator)).to(device)
    )
    outputs = OutputMoment(((few.t() @ few + 0.2 * torch.eye(200)).to(device),))
    stats = InputStats(moment)
    scheme = scheme_named("W4A16_G128")
    rounded = Gptq().round(w_OI.to(device), stats, scheme, scale_dtype=torch.bfloat16).weight
    return float(
        Descent(coupled_rounds=3).refine(w_OI.to(device), rounded, stats, outputs).facts["coupled_loss"]
    )


def test_coupled_rows_are_as_good_as_on_a_cpu() -> None:
    assert coupled_loss_on("cuda") == pytest.approx(coupled_loss_on("cpu"), rel=0.02)


@pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC"])
def test_as_good_as_on_a_cpu(name: str) -> None:
    gptq, descent = errors_on("cuda", name)
    assert (gptq, descent) == pytest.approx(errors_on("cpu", name), rel=0.02)
    assert descent < gptq
