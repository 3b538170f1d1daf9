"""Decode linears of e4m3 weights in blocks on Hopper's FP8 tensor cores against float64, and the law that a
row's bits depend on the row alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import blocks, hopper_blocks, prefill_fp8_block
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper_plan import plans
from compress.kernels.linear.prefill_fp8_block import refusal as cublas_refusal
from compress.kernels.linear.shape import Shape
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.problem import KernelDevice
from compress.models.ffn import activation as activate
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.gpu_linear import first_rows, randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper device",
    ),
]
CUDA = torch.device("cuda")
SCHEME = SCHEMES["FP8_BLOCK"]
SIZES = [((48,), 128), ((640, 384), 2944), ((1024,), 14336), ((4096, 512, 512), 2048), ((28672,), 512)]
GATED = [((128, 128), 384, "gelu"), ((1408, 1408), 2944, "silu"), ((14336, 14336), 512, "silu")]
COMPANIES = ((0, 1), (7, 8), (0, 9), (40, 57), (64, 128), (3, 100), (200, 457), (511, 512))


def weights_of(sizes: tuple[int, ...], k: int) -> list[QuantizedWeight]:
    """Weights whose blocks are of different magnitude."""
    loud = (4 * randn(1, k // 128, seed=9)).exp2().repeat_interleave(128, 1)
    return [
        nearest_weight(randn(size, k, seed=idx) * k**-0.5 * loud, SCHEME, torch.float32)
        for idx, size in enumerate(sizes)
    ]


def in_float64(x: QuantizedRows, weights: list[QuantizedWeight]) -> Tensor:
    numbers = x.values_TK.double() * x.scale_T.double().repeat_interleave(128, 1)
    return numbers @ torch.cat([each.dequantize(torch.float64) for each in weights]).t()


def case(sizes: tuple[int, ...], k: int, dtype: torch.dtype, *, gated: bool = False) -> tuple[Any, ...]:
    weights = weights_of(sizes, k)
    packed = blocks.repack(weights, dtype=dtype, device=CUDA, gated=gated)
    x = quantize(
        (randn(512, k, seed=7) * randn(512, 1, seed=8).exp2()).to(dtype), ActivationQuant(group_size=128)
    )
    return x, packed, in_float64(x, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "k"), SIZES)
def test_products_and_bits(sizes: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x, packed, exact = case(sizes, k, dtype)
    bias_O, residual = randn(sum(sizes), seed=3).to(dtype), randn(512, sum(sizes), seed=4).to(dtype)
    y = hopper_blocks.hopper_linear(x, packed, None, activation=None, out_dtype=torch.float32)
    assert float((y.double() - exact).norm() / exact.norm()) < 4 * 2.0**-14
    both = hopper_blocks.hopper_linear(x, packed, bias_O, activation=None, residual_TO=residual)
    wanted = exact + bias_O.double() + residual.double()
    assert float((both.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps
    for start, stop in COMPANIES:
        part = QuantizedRows(x.values_TK[start:stop].contiguous(), x.scale_T[start:stop].contiguous())
        alone = hopper_blocks.hopper_linear(part, packed, None, activation=None, out_dtype=torch.float32)
        assert torch.equal(alone, y[start:stop]), (start, stop)


@pytest.mark.skipif(
    cublas_refusal(
        KernelDevice("cuda", 90, torch.bfloat16).problem(
            "linear", n=128, k=128, scheme="FP8_BLOCK", phase="prefill"
        )
    )
    is not None,
    reason="torch is built for a CUDA before 12.9",
)
@pytest.mark.parametrize(("sizes", "k"), [*SIZES, ((1152,), 640), ((64, 192), 1024)])
def test_products_of_prompts(sizes: tuple[int, ...], k: int) -> None:
    x, packed, exact = case(sizes, k, torch.bfloat16)
    bias_O = randn(sum(sizes), seed=3).to(torch.bfloat16)
    residual = randn(512, sum(sizes), seed=4).to(torch.bfloat16)
    for rows in (512, 333, 129, 1):
        part = QuantizedRows(x.values_TK[:rows].contiguous(), x.scale_T[:rows].contiguous())
        y = prefill_fp8_block.linear(part, packed, None, out_dtype=torch.float32)
        assert float((y.double() - exact[:rows]).norm() / exact[:rows].norm()) < 4 * 2.0**-14
        both = prefill_fp8_block.linear(part, packed, bias_O, residual_TO=residual[:rows])
        wanted = exact[:rows] + bias_O.double() + residual[:rows].double()
        assert float((both.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("sizes", "k"), SIZES)
def test_no_plan_changes_a_bit(sizes: tuple[int, ...], k: int) -> None:
    x, packed, _ = case(sizes, k, torch.bfloat16)
    shape = Shape("fp8_block", sum(sizes), k, False)
    for rows in (1, 9, 65, 128, 321):
        few = first_rows(x, rows)
        expected = hopper_blocks.hopper_linear(few, packed, None, activation=None)
        for found in plans(shape, rows, gpu_of(torch.device("cuda", 0))):
            full = replace(found, fills=not found.fills)
            for chosen in (found, full, replace(found, stages=min(found.stages, 2), window=1)):
                y = multiply(
                    few, packed.kernel_weight, None, dtype=torch.bfloat16, activation=None, chosen=chosen
                )
                assert torch.equal(y, expected), f"M = {rows}: {chosen}"


@pytest.mark.parametrize(("sizes", "k", "activation"), GATED)
def test_gated_outputs(sizes: tuple[int, ...], k: int, activation: str) -> None:
    x, packed, exact = case(sizes, k, torch.bfloat16, gated=True)
    gate, up = exact.chunk(2, dim=1)
    wanted = activate(activation, gate) * up
    y = hopper_blocks.hopper_linear(x, packed, None, activation=activation)
    assert float((y.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(torch.bfloat16).eps
    for start, stop in COMPANIES:
        part = QuantizedRows(x.values_TK[start:stop].contiguous(), x.scale_T[start:stop].contiguous())
        assert torch.equal(
            hopper_blocks.hopper_linear(part, packed, None, activation=activation), y[start:stop]
        )
