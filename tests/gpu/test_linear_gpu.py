"""Decode linears on a GPU against float64, and the law that a row's bits depend on the row alone."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import dense16, fp4, fp8, hopper, hopper_plan, w4a16, w8a16
from compress.kernels.linear.blocks import Blocks
from compress.kernels.linear.launch import KernelWeight, prepare_rows
from compress.kernels.linear.shape import Shape
from compress.kernels.linear.stream import stream
from compress.kernels.linear.stream_plan import plans
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RawRows, quantize
from compress.models.ffn import activation as activate
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.gpu_linear import first_rows, randn, same_when_replayed
from tests.support.random_experts import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed_memory_is_nan"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS = (1, 3, 7, 8, 9, 16, 17, 33, 64, 65, 128, 257, 512)
SHAPES = [(64, 128), (208, 384), (1024, 1024), (4096, 4096), (1024, 14336)]
SCHEME_NAMES = ["W4A16_G128", "W4A16_G128_ASYM", "FP8_DYNAMIC", "BF16"]
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
)
ON_HOPPER = [
    f"{name} on Hopper"
    for name in (
        "W4A16_G128",
        "W4A16_G128_ASYM",
        "W4A16_G64",
        "W4A16_G32",
        "W4A16_G32_ASYM",
        "W4A16_CHANNEL_ASYM",
        "NVFP4",
        "MXFP4",
        "W8A16",
        "BF16",
    )
]
NAMES = [*SCHEME_NAMES, *(pytest.param(name, marks=HOPPER) for name in ON_HOPPER)]
"""Hopper's own FP8 kernel, which sums less exactly, has tests of its own."""
MODULES: dict[str, Any] = {
    **dict.fromkeys(w4a16.MULTIPLIED, w4a16),
    **dict.fromkeys(fp4.MULTIPLIED, fp4),
    "W8A16": w8a16,
    "FP8_DYNAMIC": fp8,
    "BF16": dense16,
}


@dataclass(frozen=True)
class Case:
    """A linear and its input, and the input's and weight's values in float64."""

    name: str
    packed: Any
    x: Any
    w_f64: Tensor
    x_f64: Tensor
    dtype: torch.dtype
    activation: str | None

    def __call__(self, rows: int, **epilogue: Any) -> Tensor:
        bias = epilogue.pop("bias_O", None)
        return self.function(
            first_rows(self.x, rows), self.packed, bias, activation=self.activation, **epilogue
        )

    @property
    def function(self) -> Any:
        scheme, _, hopper = self.name.partition(" ")
        return getattr(MODULES[scheme], "hopper_linear" if hopper else "linear")

    @property
    def kernel_weight(self) -> KernelWeight:
        n, k = self.w_f64.shape
        if isinstance(self.packed, w4a16.PackedW4 | fp8.PackedFp8 | Blocks):
            return self.packed.kernel_weight
        return KernelWeight("dense16", self.packed, n, k)


def case(
    name: str, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, activation: str | None = None
) -> Case:
    device = torch.device("cuda", 0)
    gated = activation is not None
    x_TI = randn(512, k, seed=1).to(dtype)
    x = x_TI
    x_f64 = x_TI.double()
    if name.startswith("BF16"):
        weight: Any = (randn(n, k, seed=2) / k**0.5).to(dtype)
        w_f64 = weight.double()
    elif "FP4" in name or name.startswith("W8"):
        weight = random_weight((n, k), name.partition(" ")[0], dtype, 2)
        w_f64 = weight.dequantize(torch.float64).to(device)
    else:
        scheme = SCHEMES[name.partition(" ")[0]]
        groups = k // (scheme.group_size or k)
        scale = randn(n, groups, seed=3).abs() / k**0.5 + 0.001
        if name.startswith("W4"):
            codes = randn(n, k, seed=2).mul(4).round().clamp(-8, 7).to(torch.int8)
            zero = (
                None
                if scheme.symmetric
                else randn(n, groups, seed=4).mul(3).round().clamp(-8, 7).to(torch.int8)
            )
            weight = QuantizedWeight(scheme, codes, scale.to(dtype), zero)
        else:
            weight = QuantizedWeight(
                scheme, (randn(n, k, seed=2) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scale / 100
            )
            x = quantize(x_TI, ActivationQuant())
            x_f64 = x.values_TK.double() * x.scale_T.double().unsqueeze(1)
        w_f64 = weight.dequantize(torch.float64)
    packed = MODULES[name.partition(" ")[0]].repack([weight], dtype=dtype, device=device, gated=gated)
    return Case(name, packed, x, w_f64, x_f64, dtype, activation)


def assert_near(actual: Tensor, expected_f64: Tensor, *, k: int) -> None:
    """Float32 sums of k terms, then one rounding to the output's dtype."""
    scale = float(expected_f64.abs().max())
    sums = 8 * torch.finfo(torch.float32).eps * k**0.5 * scale
    torch.testing.assert_close(actual.double(), expected_f64, rtol=torch.finfo(actual.dtype).eps, atol=sums)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_the_product_and_a_row_is_the_same_in_every_batch(name: str, n: int, k: int) -> None:
    linear = case(name, n, k)
    whole = linear(512, out_dtype=torch.float32)
    assert_near(whole, linear.x_f64 @ linear.w_f64.t(), k=k)
    for rows in ROWS:
        assert torch.equal(linear(rows, out_dtype=torch.float32), whole[:rows]), f"M = {rows}"
    assert torch.equal(linear(5), whole[:5].to(linear.dtype)), "the model's dtype is one rounding away"


@pytest.mark.parametrize("name", ["W4A16_G128", "W4A16_G128_ASYM"])
def test_rows_that_fill_no_tile_are_padded(name: str) -> None:
    linear = case(name, 193, 256)
    for rows in (1, 11, 40):
        y = linear(rows, bias_O=torch.zeros(193, dtype=torch.bfloat16, device="cuda"))
        assert_near(y, linear.x_f64[:rows] @ linear.w_f64.t(), k=256)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_feels_neither_its_place_nor_its_neighbours(name: str) -> None:
    linear = case(name, 512, 2048)
    y = linear(70, out_dtype=torch.float32)
    x_TI = randn(128, 2048, seed=1).to(linear.dtype)
    x_TI[1::2] *= 1000
    x_TI = x_TI.flip(0)
    loud = quantize(x_TI, ActivationQuant()) if name == "FP8_DYNAMIC" else x_TI
    flipped = linear.function(loud, linear.packed, None, activation=None, out_dtype=torch.float32).flip(0)
    assert torch.equal(flipped[:70:2], y[::2])


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize("gated", [False, True])
def test_no_plan_changes_a_bit(name: str, gated: bool) -> None:
    linear = case(name, 1024, 4096, activation="silu" if gated else None)
    device = torch.device("cuda", 0)
    weight = linear.kernel_weight
    tried = set()
    for rows in (1, 8, 16, 40):
        expected = linear(rows)
        for wgmma in {False, gpu_of(device).sm == 90}:
            for chosen in plans(Shape(weight.format, 1024, 4096, gated), rows, gpu_of(device), wgmma=wgmma):
                x = first_rows(linear.x, rows)
                y = stream(x, weight, None, dtype=linear.dtype, activation=linear.activation, chosen=chosen)
                assert torch.equal(y, expected), f"M = {rows}: {chosen}"
                tried.add(chosen)
    assert len(tried) > 8


@HOPPER
@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(1024, 4096, False), (1008, 384, True), (6144, 1024, False), (28672, 512, True)]
)
def test_no_plan_of_hoppers_changes_a_bit(name: str, n: int, k: int, gated: bool) -> None:
    linear = case(name, n, k, activation="silu" if gated else None)
    gpu = gpu_of(torch.device("cuda", 0))
    for rows in (1, 9, 33, 65, 128, 321):
        expected = linear(rows)
        for found in hopper_plan.plans(linear.kernel_weight.shape(gated=gated), rows, gpu):
            full = replace(found, fills=not found.fills)
            for chosen in (found, full, replace(found, stages=min(found.stages, 2), window=1)):
                x = first_rows(linear.x, rows)
                y = hopper.multiply(
                    x,
                    linear.kernel_weight,
                    None,
                    dtype=linear.dtype,
                    activation=linear.activation,
                    chosen=chosen,
                )
                assert torch.equal(y, expected), f"M = {rows}: {chosen}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_outputs_round_as_torch_does(name: str, activation: str) -> None:
    linear = case(name, 176, 256, activation=activation)
    plain = case(name, 176, 256)
    for rows in (1, 12, 50):
        both = plain(rows)
        expected = activate(activation, both[:, :88]) * both[:, 88:]
        torch.testing.assert_close(
            linear(rows), expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_bias_is_added_before_rounding_and_a_residual_after(name: str) -> None:
    linear = case(name, 208, 384)
    bias = randn(208, seed=7).to(torch.bfloat16)
    residual = randn(128, 208, seed=8).to(torch.bfloat16)
    for rows in (2, 16, 100):
        rounded = (linear(rows, out_dtype=torch.float32) + bias.float()).to(torch.bfloat16)
        assert torch.equal(linear(rows, bias_O=bias), rounded)
        assert torch.equal(linear(rows, bias_O=bias, residual_TO=residual[:rows]), rounded + residual[:rows])


@pytest.mark.parametrize("name", [*NAMES[:3], *NAMES[4:]])
def test_a_float16_model(name: str) -> None:
    if name.startswith("MXFP4"):
        pytest.skip("float16 does not hold every power of two that is a scale")
    linear = case(name, 208, 384, dtype=torch.float16)
    for rows in (1, 9, 40):
        assert_near(linear(rows), linear.x_f64[:rows] @ linear.w_f64.t(), k=384)


@pytest.mark.parametrize("name", NAMES)
def test_launches_are_captured_and_overlap_without_a_race(name: str) -> None:
    """Each linear reads what the one before wrote; under overlapping launches a missing wait would show."""
    if name == "FP8_DYNAMIC":
        pytest.skip("its input is quantized by another kernel")
    linear = case(name, 1024, 1024)
    x_TI = (linear.x[:3] / 8).contiguous()

    def chain() -> Tensor:
        y = x_TI
        for _ in range(12):
            y = linear.function(y, linear.packed, None, activation=None, residual_TO=x_TI) / 2
            y = linear.function(y, linear.packed, None, activation=None, residual_TO=x_TI)
        return y

    same_when_replayed(chain)


def test_no_rows_give_no_rows() -> None:
    linear = case("W4A16_G128", 64, 128)
    assert linear(0).shape == (0, 64)


RAW = [
    *(
        pytest.param(f"{name} on Hopper", n, k, marks=HOPPER)
        for name in ("W4A16_G128", "W4A16_G32_ASYM", "NVFP4", "W8A16", "BF16")
        for n, k in ((208, 384), (4096, 4096), (28672, 512))
    ),
    ("W4A16_G128", 1024, 1024),
    ("W4A16_G128", 4096, 4096),
    ("BF16", 208, 384),
    ("BF16", 1024, 14336),
]
RAW_FP8 = [("FP8_DYNAMIC", 208, 384), ("FP8_DYNAMIC", 4096, 4096), ("FP8_DYNAMIC", 1024, 14336)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("name", "n", "k"), RAW + RAW_FP8)
def test_rows_prepared_inside_the_linear_have_the_bits_of_rows_prepared_before_it(
    name: str, n: int, k: int, static: bool, normed: bool, dtype: torch.dtype
) -> None:
    fp8_input = name.startswith("FP8")
    if not fp8_input and (static or not normed):
        pytest.skip("nothing to prepare")
    linear = case(name, n, k, dtype=dtype)
    weight_K = (1 + 0.2 * randn(k, seed=5)).to(dtype) if normed else None
    static_scale = torch.tensor(0.02, device="cuda") if static else None
    quant = ActivationQuant(static_scale) if fp8_input else None
    x_TK = (3 * randn(512, k, seed=6)).to(dtype)
    x_TK[5] = 0
    x_TK[6, 3] = 60_000.0
    before = prepare_rows(RawRows(x_TK, weight_K, 1e-5, quant))
    plain = prepare_rows(RawRows(x_TK, weight_K, 1e-5)) if normed else x_TK
    assert isinstance(plain, Tensor)
    if normed:
        expected = (
            x_TK.double() / (x_TK.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_K.double()
        )
        assert float((plain.double() - expected).norm() / expected.norm()) < 2 * torch.finfo(dtype).eps
    if quant is not None:
        rounded = quantize(plain, quant)
        assert isinstance(before, QuantizedRows)
        assert torch.equal(before.scale_T, rounded.scale_T)
        assert torch.equal(before.values_TK.view(torch.uint8), rounded.values_TK.view(torch.uint8))
    whole = linear.function(before, linear.packed, None, activation=None)
    for rows in ROWS:
        raw = RawRows(x_TK[:rows], weight_K, 1e-5, quant)
        y = linear.function(raw, linear.packed, None, activation=None)
        assert torch.equal(y, whole[:rows])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [2, 40])
def test_a_broken_row_stays_broken_and_alone(rows: int, normed: bool) -> None:
    linear = case("FP8_DYNAMIC", 208, 384)
    x_TK = randn(rows, 384, seed=6).to(torch.bfloat16)
    x_TK[1, 7] = float("nan")
    raw = RawRows(
        x_TK,
        torch.ones(384, device="cuda", dtype=torch.bfloat16) if normed else None,
        1e-5,
        ActivationQuant(),
    )
    broken = fp8.linear(raw, linear.packed, None, activation=None).isnan().all(dim=1)
    assert broken.nonzero().flatten().tolist() == [1]
