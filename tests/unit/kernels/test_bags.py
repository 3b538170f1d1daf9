"""Linears that read byte codes on a CPU: the product, the bits of rows, those of the reference for prompts,
what is refused, and what it holds in memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import bags, code_table, int8, row_product, tiles
from compress.kernels.linear.bags import bags_are_fast, linear, prefill
from compress.kernels.linear.bags_int8 import linear as int8_linear
from compress.kernels.linear.code_table import CODED, CodeTable, repack
from compress.kernels.operands.rows import INT8, ActivationQuant, quantize
from compress.kernels.problem import Problem
from compress.kernels.select import KERNELS, select
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, weight_only_scheme
from compress.runtime.fused_linear import packed_bytes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((7, 256), (193, 384), (400, 1280))
"""Outputs below one block of the table, over one, and over two."""

pytestmark = pytest.mark.skipif(not bags_are_fast(), reason="no generated code for bags on this CPU")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(scheme: str, out_features: int, in_features: int, dtype: torch.dtype) -> list[QuantizedWeight]:
    """Two that are stacked, quantized from numbers that are not centred."""
    w_OI = randn(out_features, in_features).to(dtype) + 0.3
    return [nearest_weight(part, SCHEMES[scheme], dtype) for part in (w_OI[:5], w_OI[5:])]


def stacked(scheme: str, out_features: int, in_features: int, dtype: torch.dtype) -> CodeTable:
    parts = weights(scheme, out_features, in_features, dtype)
    return repack(parts, dtype=dtype, device=CPU, gated=False)


def problem(**facts: Any) -> Problem:
    return replace(Problem("linear", 64, 256, 1, 8, True, "W4A16_G128", torch.float32, "cpu", 0), **facts)


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_holds_the_weight_exactly(scheme: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        expected = torch.cat([part.dequantize() for part in weights(scheme, *shape, dtype)])
        assert torch.equal(stacked(scheme, *shape, dtype).dequantize(), expected)


@pytest.mark.parametrize("scheme", CODED)
def test_the_product_in_float32_is_that_of_codes_and_scales(scheme: str) -> None:
    """Numbers of the operator are at most twice the largest code, plus those of the sum."""
    for out_features, in_features in SHAPES:
        parts = weights(scheme, out_features, in_features, torch.bfloat16)
        table = repack(parts, dtype=torch.bfloat16, device=CPU, gated=False)
        x_TI, bias_O = randn(3, in_features, seed=1), randn(out_features, seed=2)
        residual_TO = randn(3, out_features, seed=3)
        w_OI = torch.cat([part.dequantize(torch.float32) for part in parts]).double()
        options: dict[str, Any] = {"residual_TO": residual_TO, "out_dtype": torch.float32}
        y_TO = linear(x_TI, table, bias_O, **options)
        expected = x_TI.double() @ w_OI.t() + bias_O + residual_TO
        largest = (x_TI.double().abs() @ w_OI.t().abs()).max()
        atol = 4 * torch.finfo(torch.float32).eps * float(largest)
        torch.testing.assert_close(y_TO.double(), expected, rtol=0, atol=atol)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("scheme", ["W4A16_G32_ASYM", "W8A16"])
@pytest.mark.parametrize("rows", [tiles.DECODE_ROWS, tiles.PREFILL_ROWS["cpu"]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_get_the_bits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, scheme: str, rows: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(code_table, "PART_BYTES", 1 << 20)  # 400 outputs are two parts
    for out_features, in_features in SHAPES:
        parts = weights(scheme, out_features, in_features, dtype)
        dense = tiles.dequantized(parts, dtype=dtype, device=CPU, gated=False)
        table = repack(parts, dtype=dtype, device=CPU, gated=False)
        x_TI = randn(50, in_features, seed=1).to(dtype)
        bias_O = randn(out_features, seed=2).to(dtype)
        for out_dtype in (None, torch.float32):
            options: dict[str, Any] = {"rows": rows, "out_dtype": out_dtype}
            y_TO = prefill(x_TI, table, bias_O, **options)
            assert torch.equal(y_TO, tiles.linear_in_tiles(x_TI, dense, bias_O, **options))


def test_prompts_get_the_bits_of_the_reference_in_bfloat16_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_product, "has_bfloat16_tiles", lambda: True)
    parts = weights("W4A16_G128", 193, 256, torch.bfloat16)
    dense = tiles.dequantized(parts, dtype=torch.bfloat16, device=CPU, gated=False)
    table = repack(parts, dtype=torch.bfloat16, device=CPU, gated=False)
    x_TI = randn(50, 256, seed=1).to(torch.bfloat16)
    assert torch.equal(prefill(x_TI, table, None, rows=48), tiles.linear_in_tiles(x_TI, dense, None, rows=48))


def test_an_input_that_no_tile_divides_is_filled_with_zeros_for_prompts() -> None:
    parts = weights("W8A16", 193, 119, torch.float32)
    dense = tiles.dequantized(parts, dtype=torch.float32, device=CPU, gated=False)
    table = repack(parts, dtype=torch.float32, device=CPU, gated=False)
    x_TI = randn(7, 119, seed=1)
    assert torch.equal(prefill(x_TI, table, None, rows=48), tiles.linear_in_tiles(x_TI, dense, None, rows=48))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("out_features", "in_features"), [(7, 64), (193, 448), (400, 4096)])
def test_rows_of_integers_get_the_bits_of_the_exact_product(out_features: int, in_features: int) -> None:
    """The largest codes too, whose sums a float32 could not hold over all of 4,096 inputs."""
    parts = weights("INT8_DYNAMIC", out_features, in_features, torch.bfloat16)
    parts[0].codes_OI[0] = -128
    x = quantize(randn(5, in_features, seed=1), ActivationQuant(dtype=INT8))
    x.values_TK[0] = -128
    x.values_TK[1] = 127
    exact = int8.repack(parts, dtype=torch.float32, device=CPU, gated=False)
    table = repack(parts, dtype=torch.float32, device=CPU, gated=False)
    bias_O = randn(out_features, seed=2)
    y_TO = int8_linear(x, table, bias_O)
    assert torch.equal(y_TO, int8.linear(x, exact, bias_O))
    for row in range(5):
        alone = replace(x, values_TK=x.values_TK[row : row + 1], scale_T=x.scale_T[row : row + 1])
        assert torch.equal(int8_linear(alone, table, bias_O), y_TO[row : row + 1])


def test_decode_and_prompts_read_one_table_of_a_byte_a_code() -> None:
    decode = select(problem(n=1920, k=2048))
    prompts = select(problem(n=1920, k=2048, m_max=2048, row_invariant=False))
    assert (decode.name, prompts.name) == ("bags.decode", "bags.prefill.tile48")
    assert decode.repack is prompts.repack
    w = weights("W4A16_G128", 1920, 2048, torch.bfloat16)
    table = repack(w, dtype=torch.float32, device=CPU, gated=False)
    dense = tiles.dequantized(w, dtype=torch.float32, device=CPU, gated=False)
    assert packed_bytes(table) < 1.1 * 1920 * 2048
    assert packed_bytes(table) < 0.27 * packed_bytes(dense)


def test_few_rows_of_a_prompt_keep_the_tiles_of_few_rows() -> None:
    kernel = select(problem(m_max=128, row_invariant=False))
    assert kernel.name == "bags.prefill.tile4"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"scheme": "FP8_DYNAMIC"}, "for W4A16_G128, "),
        ({"scheme": "NVFP4"}, "for W4A16_G128, "),
        ({"scheme": "BF16"}, "for W4A16_G128, "),
        ({"device": "cuda", "sm": 90}, "for a CPU"),
        ({"activation": "silu"}, "applies no activation"),
        ({"n": 1 << 20, "k": 1 << 12}, "its table would be larger than 2147483648 bytes"),
        ({"k": 200}, "K = 200 is no multiple of 128"),
        ({"scheme": "W8A16", "k": 521}, "K = 521 has no divisor from 16 to 512"),
    ],
)
@pytest.mark.parametrize("name", ["bags.decode", "bags.prefill.tile48"])
def test_what_a_table_does_not_serve_is_refused(facts: dict[str, Any], reason: str, name: str) -> None:
    phase = {} if name == "bags.decode" else {"m_max": 2048, "row_invariant": False}
    refusal = KERNELS["linear"].get(name).refusal(problem(**facts, **phase))
    assert refusal is not None
    assert refusal.startswith(reason)


def test_a_phase_of_its_own_is_refused_by_the_other_kernels() -> None:
    decode, prompts = (KERNELS["linear"].get(name) for name in ("bags.decode", "bags.prefill.tile48"))
    assert prompts.refusal(problem()) == "for the rows of prompts"
    assert decode.refusal(problem(m_max=2048, row_invariant=False)) == "for decode rows"


def test_a_cpu_without_generated_code_decodes_from_float_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    bags_are_fast.cache_clear()
    try:
        asked = problem()
        assert select(asked).name == "reference.dequantized.tile4"
        refusal = KERNELS["linear"].get("bags.decode").refusal(asked)
        assert refusal == "needs PyTorch's FBGEMM operators, and a CPU with AVX2 or AVX-512"
    finally:
        bags_are_fast.cache_clear()


def test_an_operator_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bags._bag_sums
    monkeypatch.setattr(bags, "_bag_sums", lambda *given: right(*given) + 1)
    bags_are_fast.cache_clear()
    try:
        assert not bags_are_fast()
    finally:
        bags_are_fast.cache_clear()


def test_integer_rows_have_bags_only_where_the_integer_product_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problem(scheme="INT8_DYNAMIC")
    for exact, name in ((True, "reference.int8"), (False, "bags.int8")):
        monkeypatch.setattr(int8, "has_exact_int8", lambda exact=exact: exact)
        assert select(asked).name == name
        assert select(replace(asked, m_max=2048, row_invariant=False)).name == "reference.int8"


def test_a_scheme_without_a_name_is_refused() -> None:
    unnamed = weight_only_scheme(4, symmetric=True, group_size=16)
    refusal = KERNELS["linear"].get("bags.decode").refusal(problem(scheme=unnamed.name))
    assert refusal is not None
    assert refusal.startswith("for W4A16_G128, ")


def test_no_rows_give_no_rows() -> None:
    table = stacked("W4A16_G128", 193, 384, torch.float32)
    assert linear(torch.empty(0, 384), table, None).shape == (0, 193)
    assert prefill(torch.empty(0, 384), table, None, rows=48).shape == (0, 193)
