"""The plain arithmetic that programs are held to: this runtime's is the definition of its kernels, and that
of others differs from it.
"""

import pytest
import torch

from compress.kernels.operands.rows import ActivationQuant, quantize
from compress.quant.scheme import SCHEMES
from scripts import plain_twin

EIGHT_BITS = [name for name, scheme in SCHEMES.items() if scheme.activation in ("token", "group")]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_inputs_of_this_runtime_are_those_of_its_kernels(name: str) -> None:
    scheme = SCHEMES[name]
    x_TK = torch.randn(33, 256, generator=torch.Generator().manual_seed(0))
    rows = quantize(x_TK, ActivationQuant(dtype=scheme.code_dtype, group_size=scheme.group_size))
    assert torch.equal(plain_twin.INPUTS["compress", name](x_TK), rows.dequantize(torch.float32))


def test_another_divisor_gives_other_numbers_within_a_step() -> None:
    x_TK = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    ours, theirs = (plain_twin.INPUTS[who, "INT8_DYNAMIC"](x_TK) for who in ("compress", "transformers"))
    step = x_TK.abs().amax(dim=1, keepdim=True) / 127
    assert ((ours - theirs).abs() > step / 4).float().mean() > 0.2
    assert bool(((ours - theirs).abs() <= 1.01 * step).all())
