"""Four-bit weights by e4m3 rows on Hopper against float64, in decode and for prompts, and the law that a
row's bits depend on the row alone."""

from dataclasses import replace

import pytest
import torch

from compress.kernels.linear import prefill_w4a8, w4a8
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper_plan import PROMPT_TILES, plans, prompt_plan
from compress.kernels.linear.launch import prepare_rows
from compress.kernels.linear.shape import Shape
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import QuantizedRows, RawRows, activation_quant, quantize
from compress.models.ffn import activation as activate
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.gpu_linear import first_rows, randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed_memory_is_nan"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper device",
    ),
]
SCHEME = SCHEMES["W4A8_FP8"]
SHAPES = [(48, 128), (1008, 384), (1008, 2944), (1024, 14336), (4096, 4096), (6144, 4096), (28672, 512)]
CUDA = torch.device("cuda", 0)


def weight_of(n: int, k: int, *, least: int = -7) -> QuantizedWeight:
    generator = torch.Generator("cuda").manual_seed(2)
    codes = torch.randint(least, 8, (n, k), device="cuda", generator=generator, dtype=torch.int8)
    scale = (randn(n, k // 128, seed=3).abs() + 0.1) / k**0.5
    return QuantizedWeight(SCHEME, codes, scale.to(torch.bfloat16))


def packed_of(weight: QuantizedWeight, *, gated: bool = False) -> w4a8.PackedW4A8:
    return w4a8.repack([weight], dtype=torch.bfloat16, device=CUDA, gated=gated)


def rows_of(k: int, count: int = 512) -> QuantizedRows:
    return quantize(randn(count, k, seed=1).to(torch.bfloat16), activation_quant(SCHEME))


@pytest.mark.parametrize("least", [-7, -8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_the_product_as_exactly_as_the_instruction_sums(n: int, k: int, least: int) -> None:
    weight = weight_of(n, k, least=least)
    x = rows_of(k)
    factors = x.dequantize(torch.float64), weight.dequantize(torch.float64)
    exact = factors[0] @ factors[1].t()
    magnitude = factors[0].abs() @ factors[1].abs().t()
    packed = packed_of(weight)
    decoded = w4a8.hopper_linear(x, packed, None, activation=None, out_dtype=torch.float32).double()
    prompts = [prefill_w4a8.linear(x, packed, None, out_dtype=torch.float32).double()]
    shape = Shape(packed.kernel_weight.format, n, k, False)
    for tiles in PROMPT_TILES:
        chosen = prompt_plan(shape, 512, gpu_of(CUDA), tiles=tiles)
        prompts.append(
            multiply(
                x, packed.kernel_weight, None, dtype=torch.bfloat16, activation=None,
                out_dtype=torch.float32, chosen=chosen,
            ).double()
        )  # fmt: skip
    for y in (decoded, *prompts):
        assert float((y - exact).norm() / exact.norm()) < 4 * 2.0**-14
        assert bool(((y - exact).abs() <= 2.0**-11 * magnitude).all())


@pytest.mark.parametrize(("n", "k"), [(1008, 2944), (4096, 4096), (6144, 4096), (28672, 512)])
def test_a_row_is_the_same_in_every_batch_and_in_every_plan(n: int, k: int) -> None:
    packed = packed_of(weight_of(n, k))
    x = rows_of(k)
    whole = w4a8.hopper_linear(x, packed, None, activation=None, out_dtype=torch.float32)
    for rows in (*range(1, 129), 191, 256, 449):
        y = w4a8.hopper_linear(first_rows(x, rows), packed, None, activation=None, out_dtype=torch.float32)
        assert torch.equal(y, whole[:rows]), f"M = {rows}"
    for rows in (1, 9, 33, 65, 321):
        for found in plans(Shape("w4a8", n, k, False), rows, gpu_of(CUDA)):
            full = replace(found, fills=not found.fills)
            for chosen in (found, full, replace(found, stages=min(found.stages, 2), window=1)):
                y = multiply(
                    first_rows(x, rows), packed.kernel_weight, None, dtype=torch.bfloat16, activation=None,
                    out_dtype=torch.float32, chosen=chosen,
                )  # fmt: skip
                assert torch.equal(y, whole[:rows]), f"M = {rows}: {chosen}"


@pytest.mark.parametrize(("n", "k", "activation"), [(96, 384, "gelu"), (2816, 2944, "silu")])
def test_gated_weights_and_prompts_of_them_agree(n: int, k: int, activation: str) -> None:
    weight = weight_of(n, k)
    packed = packed_of(weight, gated=True)
    for rows in (1, 17, 200):
        x = first_rows(rows_of(k), rows)
        gates_ups = prefill_w4a8.linear(x, packed, None)
        gate, up = gates_ups.chunk(2, dim=1)
        expected = activate(activation, gate) * up
        y = w4a8.hopper_linear(x, packed, None, activation=activation)
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("n", "k"), [(1008, 2944), (6144, 4096)])
def test_a_raw_row_is_the_row_prepared(n: int, k: int) -> None:
    packed = packed_of(weight_of(n, k))
    raw = RawRows(
        randn(1, k, seed=5).to(torch.bfloat16),
        randn(k, seed=6).to(torch.bfloat16),
        1e-5,
        activation_quant(SCHEME),
    )
    bias = randn(n, seed=7).to(torch.bfloat16)
    residual = randn(1, n, seed=8).to(torch.bfloat16)
    inside = w4a8.hopper_linear(raw, packed, bias, activation=None, residual_TO=residual)
    before = w4a8.hopper_linear(prepare_rows(raw), packed, bias, activation=None, residual_TO=residual)
    assert torch.equal(inside, before)
