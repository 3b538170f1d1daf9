"""Linears of int8 on tensor cores: sums are whole numbers, so decode rows by every plan, prompts by every
tile and products in slices give the bits of the definition, in any company."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import hopper_int8, int8, prefill_int8, prefill_int8_passes, slices
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper_plan import plans
from compress.kernels.linear.launch import prepare_rows
from compress.kernels.linear.shape import Shape
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import INT8, ActivationQuant, QuantizedRows, RawRows, quantize
from compress.kernels.quantize_rows.fused import quantize_rows
from compress.models.ffn import activation as activate
from tests.support.gpu_linear import first_rows, randn, same_when_replayed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed_memory_is_nan"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no device whose tensor cores multiply int8",
    ),
]
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
)

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
ROWS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 300)
QUANT = ActivationQuant(dtype=INT8)
HOW = ("dynamic", "static", "dynamic asymmetric", "static asymmetric")
each_how = pytest.mark.parametrize("how", HOW)


def quant_of(how: str) -> ActivationQuant:
    """How rows are rounded; the zero point of the static ones is far from the middle."""
    is_static = how.startswith("static")
    symmetric = "asymmetric" not in how
    return ActivationQuant(
        torch.tensor(0.017, device="cuda") if is_static else None,
        INT8,
        symmetric=symmetric,
        static_zero=torch.tensor(-83, dtype=torch.int32, device="cuda")
        if is_static and not symmetric
        else None,
    )


@dataclass(frozen=True)
class Case:
    """A linear and 512 rows of input."""

    packed: int8.PackedInt8
    x: QuantizedRows
    activation: str | None

    def __call__(self, rows: int, *, bias_O: Tensor | None = None, **epilogue: Any) -> Tensor:
        return hopper_int8.hopper_linear(
            first_rows(self.x, rows), self.packed, bias_O, activation=self.activation, **epilogue
        )

    @property
    def exact(self) -> Tensor:
        """Both scales times the whole numbers of x W^T, in float32: float64 holds every such sum."""
        n = self.packed.n
        zero_T = self.x.zero_T
        levels_TK = self.x.values_TK.double() - (0 if zero_T is None else zero_T.double().unsqueeze(1))
        sums_TO = (levels_TK @ self.packed.codes_OI.double().t())[:, :n]
        return sums_TO.float() * self.x.scale_T.unsqueeze(1) * self.packed.scale_O


def case(
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: str | None = None,
    how: str = "dynamic",
) -> Case:
    """Codes of all values, -128 too; rows have more positive numbers than negative ones."""
    generator = torch.Generator("cuda").manual_seed(2)
    codes_OI = torch.randint(-128, 128, (n, k), device="cuda", generator=generator).to(INT8)
    scale_O = (randn(n, seed=3).abs() / k**0.5 + 0.001) / 64
    x = quantize((randn(512, k, seed=1) + 0.5).to(dtype), quant_of(how))
    sum_O = codes_OI.sum(dim=1, dtype=torch.int32) if "asymmetric" in how else None
    return Case(int8.PackedInt8(codes_OI, scale_O, dtype, sum_O), x, activation)


@on_hopper
@each_how
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_decode_rows_have_the_bits_of_the_definition(n: int, k: int, how: str) -> None:
    linear = case(n, k, how=how)
    exact = linear.exact
    assert torch.equal(linear(512, out_dtype=torch.float32), exact)
    for rows in ROWS:
        assert torch.equal(linear(rows, out_dtype=torch.float32), exact[:rows]), f"M = {rows}"
        assert torch.equal(linear(rows), exact[:rows].to(torch.bfloat16)), f"M = {rows}"


@on_hopper
@pytest.mark.parametrize(("n", "k"), [(48, 128), (1008, 2944), (4096, 14336), (6144, 4096)])
def test_the_longest_sums_of_the_largest_numbers_are_exact(n: int, k: int) -> None:
    linear = case(n, k)
    largest = replace(
        linear,
        x=replace(linear.x, values_TK=torch.full_like(linear.x.values_TK, 127)),
        packed=replace(linear.packed, codes_OI=torch.full_like(linear.packed.codes_OI, -128)),
    )
    for rows in (1, 16, 65, 512):
        assert torch.equal(largest(rows, out_dtype=torch.float32), largest.exact[:rows])


@on_hopper
@pytest.mark.parametrize(("n", "k"), [(1008, 2944), (4096, 4096)])
def test_a_row_is_the_same_in_every_batch(n: int, k: int) -> None:
    linear = case(n, k)
    whole = linear(512, out_dtype=torch.float32)
    for rows in (*range(1, 129), 191, 256, 449, 512):
        assert torch.equal(linear(rows, out_dtype=torch.float32), whole[:rows]), f"M = {rows}"


@on_hopper
@pytest.mark.parametrize("how", ["dynamic", "static asymmetric"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_plan_changes_a_bit(n: int, k: int, how: str) -> None:
    linear = case(n, k, how=how)
    expected = linear.exact.to(torch.bfloat16)
    for rows in (1, 9, 33, 65, 128, 321):
        for found in plans(Shape("int8", n, k, False), rows, gpu_of(torch.device("cuda", 0))):
            full = replace(found, fills=not found.fills)
            for chosen in (found, full, replace(found, stages=min(found.stages, 2), window=1)):
                weight = linear.packed.kernel_weight
                x = first_rows(linear.x, rows)
                y = multiply(x, weight, None, dtype=torch.bfloat16, activation=None, chosen=chosen)
                assert torch.equal(y, expected[:rows]), f"M = {rows}: {chosen}"


@on_hopper
@each_how
@pytest.mark.parametrize(("n", "k", "activation"), GATED)
def test_gated_outputs_round_as_torch_does(n: int, k: int, activation: str, how: str) -> None:
    linear = case(n, k, activation=activation, how=how)
    both = linear.exact.to(torch.bfloat16)
    expected = activate(activation, both[:, : n // 2]) * both[:, n // 2 :]
    for rows in ROWS:
        torch.testing.assert_close(
            linear(rows), expected[:rows], rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6
        )


@on_hopper
@pytest.mark.parametrize("how", ["dynamic", "dynamic asymmetric"])
@pytest.mark.parametrize(("n", "k"), [(1008, 384), (4096, 4096), (6144, 1024), (28672, 512)])
def test_bias_is_added_before_rounding_and_a_residual_after(n: int, k: int, how: str) -> None:
    linear = case(n, k, how=how)
    bias = randn(n, seed=7).to(torch.bfloat16)
    residual = randn(512, n, seed=8).to(torch.bfloat16)
    with_bias = linear.exact.double() + bias.double()
    for rows in (2, 16, 100):
        y = linear(rows, bias_O=bias, out_dtype=torch.float32)
        torch.testing.assert_close(y.double(), with_bias[:rows], rtol=1e-6, atol=1e-5)
        rounded = linear(rows, bias_O=bias)
        assert torch.equal(rounded, y.to(torch.bfloat16))
        assert torch.equal(linear(rows, bias_O=bias, residual_TO=residual[:rows]), rounded + residual[:rows])


@on_hopper
@pytest.mark.parametrize(("n", "k"), [(1008, 384), (4096, 4096)])
def test_a_float16_model(n: int, k: int) -> None:
    linear = case(n, k, dtype=torch.float16)
    for rows in (1, 9, 40):
        assert torch.equal(linear(rows), linear.exact[:rows].to(torch.float16))


RAW = [(208, 384, None), (4096, 4096, None), (1024, 14336, None), (2816, 2944, "silu"), (28672, 512, "silu")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("k", [128, 384, 2944, 4096, 14336])
def test_prepared_rows_are_those_of_the_definition(k: int, normed: bool, dtype: torch.dtype) -> None:
    x_TK = (3 * randn(33, k, seed=6)).to(dtype)
    x_TK[1] = 0
    x_TK[2, 3] = 60_000.0
    x_TK[3] = x_TK[3].round() / 2
    x_TK[3, 0] = 63.5  # halves, with a scale of 1 / 2
    weight_K = (1 + 0.2 * randn(k, seed=5)).to(dtype) if normed else None
    prepared = prepare_rows(RawRows(x_TK, weight_K, 1e-5, QUANT))
    normal = prepare_rows(RawRows(x_TK, weight_K, 1e-5)) if normed else x_TK
    assert isinstance(normal, Tensor)
    for rows in (quantize(normal, QUANT), quantize_rows(normal, QUANT)):
        assert isinstance(prepared, QuantizedRows)
        assert isinstance(rows, QuantizedRows)
        assert torch.equal(prepared.values_TK, rows.values_TK)
        assert torch.equal(prepared.scale_T, rows.scale_T)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n", "k", "activation"), RAW)
def test_rows_prepared_inside_the_linear_have_the_bits_of_rows_prepared_before_it(
    n: int, k: int, activation: str | None, normed: bool, dtype: torch.dtype
) -> None:
    linear = case(n, k, dtype=dtype, activation=activation)
    weight_K = (1 + 0.2 * randn(k, seed=5)).to(dtype) if normed else None
    x_TK = (3 * randn(16, k, seed=6)).to(dtype)
    x_TK[1] = 0
    x_TK[2, 3] = 60_000.0
    before = prepare_rows(RawRows(x_TK, weight_K, 1e-5, QUANT))
    whole = hopper_int8.hopper_linear(before, linear.packed, None, activation=activation)
    for first in range(16):
        for rows in (1, 2, 5):
            raw = RawRows(x_TK[first : first + rows].contiguous(), weight_K, 1e-5, QUANT)
            y = hopper_int8.hopper_linear(raw, linear.packed, None, activation=activation)
            expected = whole[first : first + rows]
            assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), f"M = {rows}, row {first}"


@on_hopper
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize(("n", "k"), [(208, 384), (4096, 2944)])
def test_a_broken_row_stays_broken_and_alone(n: int, k: int, rows: int, broken: float) -> None:
    linear = case(n, k)
    x_TK = randn(rows, k, seed=6).to(torch.bfloat16)
    x_TK[rows // 2, 7] = broken
    weight_K = torch.ones(k, device="cuda", dtype=torch.bfloat16)
    for raw in (RawRows(x_TK, weight_K, 1e-5, QUANT), RawRows(x_TK, quant=QUANT)):
        y = hopper_int8.hopper_linear(raw, linear.packed, None, activation=None)
        assert (~y.isfinite()).any(dim=1).nonzero().flatten().tolist() == [rows // 2]
        assert not y[rows // 2].isfinite().any()


@on_hopper
@pytest.mark.parametrize("rows", [1, 3, 24, 64, 128])
@pytest.mark.parametrize("raw", [False, True])
def test_launches_are_captured_and_overlap_without_a_race(raw: bool, rows: int) -> None:
    """Each linear reads what the one before wrote; under overlapping launches a missing wait would show."""
    linear = case(1024, 1024)
    x_TI = randn(rows, 1024, seed=4).to(torch.bfloat16)

    def chain() -> Tensor:
        y = x_TI
        for _ in range(24):
            x = RawRows(y, quant=QUANT) if raw else quantize_rows(y, QUANT)
            y = hopper_int8.hopper_linear(x, linear.packed, None, activation=None, residual_TO=x_TI)
        return y

    same_when_replayed(chain)


@on_hopper
@each_how
@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_row_that_is_not_finite_breaks_itself_alone(how: str, broken: float) -> None:
    linear = case(208, 384, how=how)
    x_TK = randn(3, 384, seed=6).to(torch.bfloat16)
    x_TK[1, 7] = broken
    rows = quantize_rows(x_TK, quant_of(how))
    for y in (
        hopper_int8.hopper_linear(rows, linear.packed, None, activation=None),
        slices.linear(rows, linear.packed, None, activation=None),
        prefill_int8.linear(rows, linear.packed, None),
    ):
        assert y.isfinite().all(dim=1).tolist() == [True, False, True]
        assert not y[1].isfinite().any()


@each_how
@pytest.mark.parametrize("k", [128, 2944, 14336])
def test_given_rows_are_those_of_the_definition(k: int, how: str) -> None:
    quant = quant_of(how)
    x_TK = (3 * randn(33, k, seed=6) + 1).to(torch.bfloat16)
    x_TK[1] = 0
    x_TK[2, 3] = 60_000.0
    x_TK[3] = -x_TK[3].abs()
    found, expected = quantize_rows(x_TK, quant), quantize(x_TK, quant)
    assert isinstance(found, QuantizedRows)
    assert torch.equal(found.values_TK, expected.values_TK)
    assert torch.equal(found.scale_T, expected.scale_T)
    assert (found.zero_T is None) == (expected.zero_T is None)
    assert found.zero_T is None or expected.zero_T is None or torch.equal(found.zero_T, expected.zero_T)


SLICED = [(1021, 720, None), (4096, 4096, None), (2816, 2944, "silu")]


@each_how
@pytest.mark.parametrize(("n", "k", "activation"), SLICED)
def test_products_in_slices_have_the_bits_of_the_definition(
    n: int, k: int, activation: str | None, how: str
) -> None:
    linear = case(n, k, how=how)
    exact = linear.exact
    for rows in ROWS:
        y = slices.linear(
            first_rows(linear.x, rows), linear.packed, None, activation=activation, out_dtype=torch.float32
        )
        if activation is None:
            assert torch.equal(y, exact[:rows]), f"M = {rows}"
        else:
            gated = torch.nn.functional.silu(exact[:rows, : n // 2]) * exact[:rows, n // 2 :]
            torch.testing.assert_close(y, gated, rtol=2**-18, atol=1e-30)


PROMPTS = [(1021, 720), (64, 32), (4096, 4096), (1008, 14336)]


@each_how
@pytest.mark.parametrize("rows", [1, 63, 128, 129, 1000, 2048])
@pytest.mark.parametrize(("n", "k"), PROMPTS)
def test_prompts_have_the_bits_of_the_definition(n: int, k: int, rows: int, how: str) -> None:
    linear = case(n, k, how=how)
    x = quantize((randn(rows, k, seed=9) + 0.5).to(torch.bfloat16), quant_of(how))
    exact = replace(linear, x=x).exact
    residual = randn(rows, n, seed=8).to(torch.bfloat16)
    rounded = exact.to(torch.bfloat16)
    gpu = gpu_of(torch.device("cuda", 0))
    for tile in (None, *(each for each, _ in prefill_int8.TILES[90 if gpu.sm >= 90 else 80])):
        assert torch.equal(prefill_int8.linear(x, linear.packed, None, tile=tile), rounded), tile
        y = prefill_int8.linear(x, linear.packed, None, residual_TO=residual, tile=tile)
        assert torch.equal(y, rounded + residual), tile
    assert torch.equal(prefill_int8.linear(x, linear.packed, None, out_dtype=torch.float32), exact)


@each_how
@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(("n", "k"), [(1024, 720), (64, 32), (4096, 4096)])
def test_prompts_in_two_passes_have_the_bits_of_the_definition(n: int, k: int, rows: int, how: str) -> None:
    linear = case(n, k, how=how)
    x = first_rows(linear.x, rows)
    exact = linear.exact[:rows]
    residual = randn(rows, n, seed=8).to(torch.bfloat16)
    y = prefill_int8_passes.linear(x, linear.packed, None, residual_TO=residual)
    assert torch.equal(y, exact.to(torch.bfloat16) + residual)
    assert torch.equal(prefill_int8_passes.linear(x, linear.packed, None, out_dtype=torch.float32), exact)


@pytest.mark.parametrize("product", [prefill_int8.linear, prefill_int8_passes.linear])
def test_a_bias_of_a_prompt_is_added_before_rounding(product: Any) -> None:
    linear = case(1008, 384)
    bias = randn(1008, seed=7).to(torch.bfloat16)
    y = product(linear.x, linear.packed, bias, out_dtype=torch.float32)
    torch.testing.assert_close(y.double(), linear.exact.double() + bias.double(), rtol=1e-6, atol=1e-5)
    assert torch.equal(product(linear.x, linear.packed, bias), y.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [200, 600])
def test_prompts_are_captured_and_overlap_without_a_race(rows: int) -> None:
    linear = case(1024, 1024)
    x_TI = randn(rows, 1024, seed=4).to(torch.bfloat16)

    def chain() -> Tensor:
        y = x_TI
        for _ in range(24):
            y = prefill_int8.linear(quantize_rows(y, QUANT), linear.packed, None, residual_TO=x_TI)
        return y

    same_when_replayed(chain)


def test_no_rows_give_no_rows() -> None:
    linear = case(64, 128)
    assert prefill_int8.linear(first_rows(linear.x, 0), linear.packed, None).shape == (0, 64)
    assert slices.linear(first_rows(linear.x, 0), linear.packed, None, activation=None).shape == (0, 64)
