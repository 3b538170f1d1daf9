"""GPTQ and coordinate descent on a GPU, where a block of columns is one launch, against the loops in torch."""

import pytest
import torch

pytest.importorskip("pydantic")

from compress.calibrate.stats import SecondMoment
from compress.methods.descent import Descent
from compress.methods.gptq import Gptq
from compress.quant.numerics import output_error
from compress.quant.scheme import scheme_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def errors_on(device: str, name: str) -> tuple[float, float]:
    """Output error after GPTQ, and after descent on it, of one linear whose inputs are correlated."""
    generator = torch.Generator().manual_seed(0)
    w_OI = torch.randn(200, 384, generator=generator)
    x_TI = torch.randn(1024, 384, generator=generator) @ (torch.eye(384) + 0.3 * torch.randn(384, 384, generator=generator))
    moment = SecondMoment()
    moment.update(x_TI.to(device))
    w_OI, stats, scheme = w_OI.to(device), {"second_moment": moment}, scheme_named(name)
    rounded = Gptq().round(w_OI, stats, scheme, scale_dtype=torch.bfloat16).weight
    refined = Descent().refine(w_OI, rounded, stats).weight
    both = [output_error(w_OI, each.dequantize(torch.float32), moment.mean()) for each in (rounded, refined)]
    return both[0], both[1]


@pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC"])
def test_as_good_as_on_a_cpu(name: str) -> None:
    gptq, descent = errors_on("cuda", name)
    assert (gptq, descent) == pytest.approx(errors_on("cpu", name), rel=0.02)
    assert descent < gptq
