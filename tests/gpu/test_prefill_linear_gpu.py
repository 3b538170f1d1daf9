"""Linears of many rows on a GPU against float64, for odd sizes, in poisoned memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import (
    fp4,
    prefill_dense16,
    prefill_fp8,
    prefill_w4a16,
    prefill_widened,
    w8a16,
)
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper_plan import PROMPT_TILES, prompt_plan
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.problem import Problem
from compress.kernels.select import select
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.random_experts import random_weight as rounded_weight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
CUDA = torch.device("cuda")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
)
W4A16 = ["W4A16_G128", "W4A16_G128_ASYM", "W4A16_G64", "W4A16_G32_ASYM", "W4A16_CHANNEL"]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=CUDA, dtype=dtype)


def random_weight(
    scheme: str, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    facts = SCHEMES[scheme]
    if facts.type == "float":
        codes = (torch.randn(n, k, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(n, 1, generator=generator) * 1e-3 + 1e-4
        return QuantizedWeight(facts, codes.to(CUDA), scale.to(CUDA))
    codes = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, k // (facts.group_size or k), generator=generator) * 0.02 + 1e-3).to(dtype)
    zero = (
        None
        if facts.symmetric
        else torch.randint(-8, 8, scale.shape, generator=generator, dtype=torch.int8).to(CUDA)
    )
    return QuantizedWeight(facts, codes.to(CUDA), scale.to(CUDA), zero)


def assert_close(actual: Tensor, expected_f64: Tensor, depth: int) -> None:
    """One rounding of the result, and of sums in float32: c eps sqrt(K) absmax."""
    eps = torch.finfo(actual.dtype).eps
    largest = float(expected_f64.abs().max())
    accumulated = 16 * torch.finfo(torch.float32).eps * depth**0.5 * largest
    torch.testing.assert_close(actual.double(), expected_f64, rtol=4 * eps, atol=accumulated + eps * largest)


def check(linear: Any, x: Any, packed: Any, product_f64: Tensor, depth: int, dtype: torch.dtype) -> None:
    """Plain, with bias and residual, and in float32."""
    num_rows, n = product_f64.shape
    bias = randn(n, seed=8, dtype=dtype)
    residual = randn(num_rows, n, seed=9, dtype=dtype)
    before = residual.clone()
    assert_close(linear(x, packed, None), product_f64, depth)
    assert_close(
        linear(x, packed, bias, residual_TO=residual), product_f64 + bias.double() + residual.double(), depth
    )
    assert torch.equal(residual, before)
    wide = linear(x, packed, bias, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(
        wide.double(), product_f64 + bias.double(), rtol=0, atol=1e-3 * float(product_f64.abs().max())
    )  # far below the rounding of a 16-bit result
    assert float((wide.double() - product_f64 - bias.double()).norm() / product_f64.norm()) < 2e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 128), (129, 200, 384), (300, 1040, 640)])
def test_dense16(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    w_OI = randn(n, k, dtype=dtype)
    x_TI = randn(num_rows, k, seed=1, dtype=dtype)
    packed = prefill_dense16.repack([w_OI[:40], w_OI[40:]], dtype=dtype, device=CUDA, gated=False)
    check(prefill_dense16.linear, x_TI, packed, x_TI.double() @ w_OI.double().t(), k, dtype)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_STATIC"])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 128), (17, 208, 384), (300, 1040, 656)])
def test_fp8(num_rows: int, n: int, k: int, scheme: str) -> None:
    weight = random_weight("FP8_DYNAMIC", n, k)
    static = ActivationQuant(torch.tensor(0.011, device=CUDA) if scheme == "FP8_STATIC" else None)
    rows: QuantizedRows = quantize(randn(num_rows, k, seed=1), static)
    packed = prefill_fp8.repack([weight], dtype=torch.bfloat16, device=CUDA, gated=False)
    x_f64 = rows.values_TK.double() * rows.scale_T.double().unsqueeze(1)
    check(
        prefill_fp8.linear,
        rows,
        packed,
        x_f64 @ (weight.codes_OI.double() * weight.scale_OG.double()).t(),
        k,
        torch.bfloat16,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", W4A16)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 128), (129, 208, 384), (300, 1000, 640)])
def test_w4a16(
    num_rows: int,
    n: int,
    k: int,
    gated: bool,
    scheme: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [random_weight(scheme, n // 2, k, dtype=dtype, seed=seed) for seed in (0, 1)]
    dense_OI = torch.cat([weight.dequantize() for weight in weights])
    packed = prefill_w4a16.repack(weights, dtype=dtype, device=CUDA, gated=gated)
    x_TI = randn(num_rows, k, seed=2, dtype=dtype)
    whole = torch.empty_like(dense_OI).view(2 if gated else 1, -1, k)
    for piece_rows in (prefill_w4a16.MIN_PIECE_ROWS, 96):
        monkeypatch.setattr(prefill_w4a16, "MIN_PIECE_ROWS", piece_rows)
        monkeypatch.setattr(prefill_w4a16, "MIN_ROWS_FOR_PIECES", 1)
        monkeypatch.setattr(prefill_w4a16, "SCRATCH_BYTES", 1)
        monkeypatch.setattr(prefill_w4a16, "MAX_PRODUCT_ROWS", 0)
        for start, w_HPK in prefill_w4a16.pieces(packed):
            whole[:, start : start + w_HPK.shape[1]] = w_HPK
        assert torch.equal(whole.view(n, k), dense_OI)  # rounded as every consumer of the checkpoint does
        check(prefill_w4a16.linear, x_TI, packed, x_TI.double() @ dense_OI.double().t(), k, dtype)


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", W4A16)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "n", "k"),
    [(1, 64, 128), (129, 224, 384), (333, 2816, 2944), (257, 8448, 256), (1024, 4096, 1024)],
)
def test_w4a16_products(num_rows: int, n: int, k: int, gated: bool, scheme: str, dtype: torch.dtype) -> None:
    """Blocks of 128 rows dequantize on the way to the tensor cores, in units of eight and of twelve tiles."""
    weights = [random_weight(scheme, n // 2, k, dtype=dtype, seed=seed) for seed in (0, 1)]
    dense_OI = torch.cat([weight.dequantize() for weight in weights])
    packed = prefill_w4a16.repack(weights, dtype=dtype, device=CUDA, gated=gated)
    x_TI = randn(num_rows, k, seed=2, dtype=dtype)
    product_f64 = x_TI.double() @ dense_OI.double().t()
    check(prefill_w4a16.linear, x_TI, packed, product_f64, k, dtype)
    for tiles in PROMPT_TILES:
        shape = packed.kernel_weight.shape(gated=gated)
        chosen = prompt_plan(shape, num_rows, gpu_of(CUDA), tiles=tiles)
        y_TO = multiply(x_TI, packed.kernel_weight, None, dtype=dtype, activation=None, chosen=chosen)
        assert_close(y_TO, product_f64, k)


@HOPPER
@pytest.mark.parametrize(("scheme", "dtype"), [("NVFP4", torch.float16), ("MXFP4", torch.bfloat16)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "n", "k"), [(1, 64, 128), (129, 224, 384), (333, 2816, 2944), (1100, 8448, 256)]
)
def test_fp4(num_rows: int, n: int, k: int, gated: bool, scheme: str, dtype: torch.dtype) -> None:
    weights = [rounded_weight((n // 2, k), scheme, dtype, seed) for seed in (0, 1)]
    exact = torch.cat([weight.dequantize(torch.float32) for weight in weights]).to(CUDA)
    packed = fp4.repack(weights, dtype=dtype, device=CUDA, gated=gated)
    found = prefill_w4a16.dequantize(packed, 0, packed.blocks.shape[0]).flatten(0, 1)
    assert torch.equal(found, exact.to(dtype))
    x_TI = randn(num_rows, k, seed=2, dtype=dtype)
    check(prefill_w4a16.linear, x_TI, packed, x_TI.double() @ exact.double().t(), k, dtype)


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "n", "k"), [(1, 64, 128), (129, 224, 384), (333, 2816, 2944), (500, 224, 384)]
)
def test_w8a16(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    weights = [rounded_weight((n // 2, k), "W8A16", dtype, seed) for seed in (0, 1)]
    exact = torch.cat([weight.dequantize(torch.float32) for weight in weights]).to(CUDA)
    packed = w8a16.repack(weights, dtype=dtype, device=CUDA, gated=False)
    assert torch.equal(prefill_widened.dequantize(packed, 0, n), exact.to(dtype))
    x_TI = randn(num_rows, k, seed=2, dtype=dtype)
    dense = exact if num_rows < prefill_widened.MIN_ROWS else exact.to(dtype)
    check(prefill_widened.linear, x_TI, packed, x_TI.double() @ dense.double().t(), k, dtype)


def problem(scheme: str, **facts: Any) -> Problem:
    major, minor = torch.cuda.get_device_capability()
    defaults: dict[str, Any] = {
        "n": 512,
        "k": 512,
        "m_min": 1,
        "m_max": 2048,
        "row_invariant": False,
        "dtype": torch.bfloat16,
    }
    return Problem(op="linear", scheme=scheme, device="cuda", sm=10 * major + minor, **{**defaults, **facts})


def test_they_are_chosen_for_prefill() -> None:
    wanted: Sequence[tuple[str, str]] = [("BF16", "dense16.cublas"), ("W4A16_G128", "w4a16.dequantize")]
    for scheme, name in wanted:
        assert select(problem(scheme)).name == name
    if torch.cuda.get_device_capability() >= (9, 0):
        assert select(problem("FP8_DYNAMIC")).name == "fp8.cublas"
    assert select(problem("BF16", dtype=torch.float32)).name != "dense16.cublas"
