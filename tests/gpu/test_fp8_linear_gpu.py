"""Decode linears on Hopper's FP8 tensor cores against float64, and the law that a row's bits depend on the
row alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import fp8
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper_plan import plans
from compress.kernels.linear.launch import prepare_rows
from compress.kernels.linear.shape import Shape
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RawRows, quantize
from compress.kernels.quantize_rows.fused import quantize_rows
from compress.models.ffn import activation as activate
from tests.support.gpu_linear import first_rows, randn, same_when_replayed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed_memory_is_nan"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper device",
    ),
]

SHAPES = [
    (48, 128),
    (1008, 384),
    (1008, 2944),
    (1024, 14336),
    (4096, 4096),
    (6144, 4096),
    (28672, 512),
    (80000, 256),
]
GATED = [(96, 384, "gelu"), (2816, 2944, "silu"), (28672, 512, "gelu_pytorch_tanh")]
ROWS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 127)


@dataclass(frozen=True)
class Case:
    """A linear and 512 rows of input, and the input's and weight's values in float64."""

    packed: fp8.PackedFp8
    x: QuantizedRows
    activation: str | None

    def __call__(self, rows: int, *, bias_O: Tensor | None = None, **epilogue: Any) -> Tensor:
        return fp8.hopper_linear(
            first_rows(self.x, rows), self.packed, bias_O, activation=self.activation, **epilogue
        )

    @property
    def exact(self) -> Tensor:
        """x W^T in float64."""
        return self.x.values_TK.double() * self.x.scale_T.double().unsqueeze(1) @ self.w_f64.t()

    @property
    def magnitude(self) -> Tensor:
        """|x| |W|^T: what rounding inside a sum is relative to."""
        return self.x.values_TK.double().abs() * self.x.scale_T.double().unsqueeze(1) @ self.w_f64.abs().t()

    @property
    def w_f64(self) -> Tensor:
        return self.packed.values.double() * self.packed.scale_O.double().unsqueeze(1)


def case(n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, activation: str | None = None) -> Case:
    values = (randn(n, k, seed=2) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale_O = (randn(n, seed=3).abs() / k**0.5 + 0.001) / 100
    x = quantize(randn(512, k, seed=1).to(dtype), ActivationQuant())
    return Case(fp8.PackedFp8(values, scale_O, dtype), x, activation)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_the_product_as_exactly_as_the_instruction_sums(n: int, k: int) -> None:
    """Of each product the instruction drops what is below 2^-13 of the greatest beside it, at most; float32
    sums of chunks add nothing to speak of.
    """
    linear = case(n, k)
    y = linear(512, out_dtype=torch.float32).double()
    exact = linear.exact
    assert float((y - exact).norm() / exact.norm()) < 4 * 2.0**-14
    assert bool(((y - exact).abs() <= 2.0**-11 * linear.magnitude).all())


@pytest.mark.parametrize(("n", "k"), [(1008, 2944), (4096, 4096), (6144, 4096), (28672, 512)])
def test_a_row_is_the_same_in_every_batch(n: int, k: int) -> None:
    linear = case(n, k)
    whole = linear(512, out_dtype=torch.float32)
    for rows in (*range(1, 129), 191, 256, 449, 512):
        assert torch.equal(linear(rows, out_dtype=torch.float32), whole[:rows]), f"M = {rows}"


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_plan_changes_a_bit(n: int, k: int) -> None:
    linear = case(n, k)
    gpu = gpu_of(torch.device("cuda", 0))
    for rows in (1, 9, 33, 65, 128, 321):
        expected = linear(rows)
        for found in plans(Shape("fp8", n, k, False), rows, gpu):
            full = replace(found, fills=not found.fills)
            for chosen in (found, full, replace(found, stages=min(found.stages, 2), window=1)):
                x = first_rows(linear.x, rows)
                packed = linear.packed
                y = multiply(
                    x, packed.kernel_weight, None, dtype=packed.dtype, activation=None, chosen=chosen
                )
                assert torch.equal(y, expected), f"M = {rows}: {chosen}"


def test_a_row_feels_neither_its_place_nor_its_neighbours() -> None:
    linear = case(1008, 2048)
    y = linear(70, out_dtype=torch.float32)
    loud_TI = randn(128, 2048, seed=1).to(torch.bfloat16)
    loud_TI[1::2] *= 1000
    loud = quantize(loud_TI.flip(0), ActivationQuant())
    flipped = fp8.hopper_linear(loud, linear.packed, None, activation=None, out_dtype=torch.float32).flip(0)
    assert torch.equal(flipped[:70:2], y[::2])


@pytest.mark.parametrize(("n", "k", "activation"), GATED)
def test_gated_outputs_round_as_torch_does(n: int, k: int, activation: str) -> None:
    """The same sums whether gated or not, where units are the same; else the instruction's order differs, and
    a rounding may.
    """
    linear = case(n, k, activation=activation)
    plain = case(n, k)
    half = n // 2
    for rows in ROWS:
        both = plain(rows)
        expected = activate(activation, both[:, :half]) * both[:, half:]
        torch.testing.assert_close(
            linear(rows), expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6
        )


@pytest.mark.parametrize(("n", "k"), [(1008, 384), (4096, 4096), (6144, 1024), (28672, 512)])
def test_bias_is_added_before_rounding_and_a_residual_after(n: int, k: int) -> None:
    linear = case(n, k)
    bias = randn(n, seed=7).to(torch.bfloat16)
    residual = randn(128, n, seed=8).to(torch.bfloat16)
    for rows in (2, 16, 100):
        rounded = (linear(rows, out_dtype=torch.float32) + bias.float()).to(torch.bfloat16)
        assert torch.equal(linear(rows), linear(rows, out_dtype=torch.float32).to(torch.bfloat16))
        assert torch.equal(linear(rows, bias_O=bias), rounded)
        assert torch.equal(linear(rows, bias_O=bias, residual_TO=residual[:rows]), rounded + residual[:rows])


@pytest.mark.parametrize(("n", "k"), [(1008, 384), (4096, 4096)])
def test_a_float16_model(n: int, k: int) -> None:
    linear = case(n, k, dtype=torch.float16)
    for rows in (1, 9, 40):
        assert torch.equal(linear(rows), linear(rows, out_dtype=torch.float32).to(torch.float16))
        assert float((linear(rows).double() - linear.exact[:rows]).norm() / linear.exact[:rows].norm()) < 1e-3


RAW = [(208, 384, None), (4096, 4096, None), (1024, 14336, None), (2816, 2944, "silu"), (28672, 512, "silu")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("n", "k", "activation"), RAW)
def test_rows_prepared_inside_the_linear_have_the_bits_of_rows_prepared_before_it(
    n: int, k: int, activation: str | None, static: bool, normed: bool, dtype: torch.dtype
) -> None:
    linear = case(n, k, dtype=dtype, activation=activation)
    weight_K = (1 + 0.2 * randn(k, seed=5)).to(dtype) if normed else None
    quant = ActivationQuant(torch.tensor(0.02, device="cuda") if static else None)
    x_TK = (3 * randn(16, k, seed=6)).to(dtype)
    x_TK[1] = 0
    x_TK[2, 3] = 60_000.0
    before = prepare_rows(RawRows(x_TK, weight_K, 1e-5, quant))
    whole = fp8.hopper_linear(before, linear.packed, None, activation=activation)
    assert bool(whole.isfinite().all()) or dtype == torch.float16
    for rows in (1, 2, 3, 4, 5, 16):
        raw = RawRows(x_TK[:rows].contiguous(), weight_K, 1e-5, quant)
        y = fp8.hopper_linear(raw, linear.packed, None, activation=activation)
        assert torch.equal(y.view(torch.int16), whole[:rows].view(torch.int16)), f"M = {rows}"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [2, 3, 40])
@pytest.mark.parametrize(("n", "k"), [(208, 384), (4096, 2944)])
def test_a_broken_row_stays_broken_and_alone(n: int, k: int, rows: int, normed: bool) -> None:
    linear = case(n, k)
    x_TK = randn(rows, k, seed=6).to(torch.bfloat16)
    x_TK[1, 7] = float("nan")
    raw = RawRows(
        x_TK, torch.ones(k, device="cuda", dtype=torch.bfloat16) if normed else None, 1e-5, ActivationQuant()
    )
    y = fp8.hopper_linear(raw, linear.packed, None, activation=None)
    assert y.isnan().any(dim=1).nonzero().flatten().tolist() == [1]
    assert bool(y[1].isnan().all())


@pytest.mark.parametrize("rows", [1, 3, 24, 64])
@pytest.mark.parametrize("raw", [False, True])
def test_launches_are_captured_and_overlap_without_a_race(raw: bool, rows: int) -> None:
    """Each linear reads what the one before wrote; under overlapping launches a missing wait would show."""
    linear = case(1024, 1024)
    x_TI = randn(rows, 1024, seed=4).to(torch.bfloat16)

    def chain() -> Tensor:
        y = x_TI
        for _ in range(24):
            x = RawRows(y, quant=ActivationQuant()) if raw else quantize_rows(y, ActivationQuant())
            y = fp8.hopper_linear(x, linear.packed, None, activation=None, residual_TO=x_TI)
        return y

    same_when_replayed(chain)


def test_no_rows_give_no_rows() -> None:
    assert case(64, 128)(0).shape == (0, 64)
