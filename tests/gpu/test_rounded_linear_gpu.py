"""Linears of inputs in blocks with scales of one byte: the product of rounded rows in float64, and a
row's bits in any company, for the kernels that a GPU selects."""

from typing import Any

import pytest
import torch

from compress.kernels.linear.launch import ACTIVATIONS
from compress.kernels.operands.rows import input_quant, quantize
from compress.kernels.problem import KernelDevice
from compress.kernels.quantize_rows.blocks import quantize_blocks
from compress.kernels.select import select
from tests.support.random_experts import randn, random_weight
from tests.unit.kernels.test_experts import same_bits, wide
from tests.unit.kernels.test_general_linear import in_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
CUDA = torch.device("cuda")
ROWS = 300
COMPANIES = ((0, 1), (7, 8), (3, 12), (40, 56), (0, 128), (100, 299))
"""Ranges of rows that one call computes."""


@pytest.mark.parametrize(
    ("phase", "activation"), [("prefill", None), *(("decode", each) for each in ACTIVATIONS)]
)
@pytest.mark.parametrize(("sizes", "k"), [((256, 256), 512), ((64, 64), 96), ((4096, 4096), 2048)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVFP4_W4A4", torch.bfloat16),
        ("NVFP4_W4A4", torch.float16),
        ("MXFP4_W4A4", torch.bfloat16),
        ("MXFP8", torch.bfloat16),
    ],
)
def test_rounded_rows_are_multiplied_as_the_definition_says(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], k: int, phase: Any, activation: str | None
) -> None:
    problem = KernelDevice.from_torch(CUDA, dtype).problem(
        "linear", n=sum(sizes), k=k, phase=phase, scheme=name, activation=activation
    )
    kernel = select(problem)
    assert kernel.name.endswith(".rounded.dequantized" if name == "MXFP8" else ".rounded")
    assert kernel.repack is not None
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    packed = kernel.repack(weights, dtype=dtype, device=CUDA, gated=activation is not None)
    quant = input_quant(weights, CUDA)
    assert quant is not None
    x_TI = randn(ROWS, k, seed=1).to(CUDA, dtype)
    rows, codes = quantize(x_TI, quant), quantize_blocks(x_TI, quant)
    assert same_bits(codes.values_TK, rows.values_TK)
    assert same_bits(codes.scale_T, rows.scale_T)
    bias_O = randn(sum(sizes), seed=4).to(CUDA, dtype)
    numbers = rows.dequantize(torch.float32).to(dtype).double()
    expected = in_float64(numbers, [wide(each).to(CUDA) for each in weights], bias_O, activation)
    residual = randn(*expected.shape, seed=2).to(CUDA, dtype)
    y_TO = kernel.fn(rows, packed, bias_O, residual_TO=residual)
    wanted = expected + residual.double()
    assert y_TO.dtype == dtype
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps
    if phase == "decode":
        for start, stop in COMPANIES:
            part = kernel.fn(rows[start:stop], packed, bias_O, residual_TO=residual[start:stop])
            assert same_bits(part, y_TO[start:stop]), (start, stop)
