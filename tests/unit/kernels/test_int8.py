"""INT8 rows and their linear: the definition, sums that lose nothing, bits that every kernel shares, and what
is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.kernels.linear.int8 import MAX_K, MAX_K_OF, PackedInt8, int_product, linear, refusal, repack
from compress.kernels.linear.launch import prepare_rows
from compress.kernels.linear.prefill_int8 import tile_of
from compress.kernels.linear.slices import linear as in_slices
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.rows import (
    FP8,
    INT8,
    ActivationQuant,
    QuantizedRows,
    RawRows,
    input_quant,
    quantize,
)
from compress.kernels.problem import KernelDevice, Problem
from compress.kernels.select import select
from compress.models.weights import MemorySource, build_decoder, dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight
from compress.runtime.engine import Engine
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated, use_emulated_rows
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source, tiny_tokens

CPU = torch.device("cpu")
SCHEME = SCHEMES["INT8_DYNAMIC"]
STATIC = ActivationQuant(torch.tensor(0.021), INT8)
ASYMMETRIC = ActivationQuant(dtype=INT8, symmetric=False)
STATIC_ASYMMETRIC = ActivationQuant(
    torch.tensor(0.013), INT8, symmetric=False, static_zero=torch.tensor(-91, dtype=torch.int32)
)
QUANTS = {"INT8_STATIC": STATIC, "INT8_DYNAMIC_ASYM": ASYMMETRIC, "INT8_STATIC_ASYM": STATIC_ASYMMETRIC}
each_quant = pytest.mark.parametrize(("name", "quant"), QUANTS.items(), ids=QUANTS)
ARCH = tiny_arch(
    LLAMA,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    head_dim=32,
    num_hidden_layers=2,
    dtype="float32",
)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, seed: int = 0) -> Tensor:
    """Of all values, -128 too."""
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(INT8)


def weights(*rows: int, in_features: int) -> list[QuantizedWeight]:
    generator = torch.Generator().manual_seed(1)
    return [
        nearest_weight(torch.randn(each, in_features, generator=generator), SCHEME, torch.bfloat16)
        for each in rows
    ]


def packed(
    *rows: int, in_features: int, dtype: torch.dtype = torch.float32, name: str = "INT8_DYNAMIC"
) -> PackedInt8:
    parts = [replace(each, scheme=SCHEMES[name]) for each in weights(*rows, in_features=in_features)]
    return repack(parts, dtype=dtype, device=CPU, gated=False)


def skewed(rows: int, k: int, *, seed: int) -> Tensor:
    """Rows most of whose numbers are positive, and one of whose are all negative."""
    x_TK = randn(rows, k, seed=seed).exp() - 0.7
    x_TK[1::5] *= -1
    return x_TK


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 1, 1), (4, 7, 129), (17, 64, 65), (33, 200, 1031), (3, 40, 14336)]
)
def test_the_product_is_that_of_whole_numbers(rows: int, n: int, k: int) -> None:
    x_TK = codes(rows, k)
    w_OI = codes(n, k, seed=1)
    padded_OI = torch.nn.functional.pad(w_OI, (0, -k % 8, 0, -n % 8))
    assert torch.equal(
        int_product(x_TK, padded_OI)[:, :n].to(torch.int64), x_TK.to(torch.int64) @ w_OI.to(torch.int64).t()
    )


def test_the_longest_sum_of_the_largest_numbers_does_not_overflow() -> None:
    x_TK = torch.full((1, MAX_K), 127, dtype=INT8)
    w_OI = torch.full((8, MAX_K), -128, dtype=INT8)
    padded_OI = torch.nn.functional.pad(w_OI, (0, -MAX_K % 8))
    assert int_product(x_TK, padded_OI).unique().tolist() == [-127 * 128 * MAX_K]
    problem = Problem("linear", 8, MAX_K + 1, 1, 8, True, "INT8_DYNAMIC", torch.bfloat16, "cpu", 0)
    assert "overflow" in str(refusal(problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_linear_is_the_product_of_both_rounded_factors(dtype: torch.dtype) -> None:
    """Against float64: the product is exact, so what is left is one rounding of each of two scalings and of
    the result.
    """
    parts = weights(37, 20, in_features=129)
    x_TI = torch.randn(11, 129, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows = quantize(x_TI, ActivationQuant(dtype=INT8))
    layout = repack(parts, dtype=dtype, device=CPU, gated=False)
    w_OI = torch.cat([part.codes_OI.double() * part.scale_OG.double() for part in parts])
    exact = (rows.values_TK.double() * rows.scale_T.double().unsqueeze(1)) @ w_OI.t()
    y_TO = linear(rows, layout, None)
    assert y_TO.dtype == dtype
    torch.testing.assert_close(y_TO.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(
        linear(rows, layout, None, out_dtype=torch.float32).double(), exact, rtol=2e-7 * 2, atol=0
    )
    bias_O = torch.randn(57).to(dtype)
    residual_TO = torch.randn(11, 57).to(dtype)
    assert torch.equal(linear(rows, layout, bias_O, residual_TO=residual_TO), residual_TO + (y_TO + bias_O))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    layout = packed(64, in_features=384)
    x_TI = torch.randn(70, 384, generator=torch.Generator().manual_seed(3))
    together = linear(quantize(x_TI, ActivationQuant(dtype=INT8)), layout, None)
    for part in (slice(0, 1), slice(3, 20), slice(5, 70)):
        assert torch.equal(
            linear(quantize(x_TI[part], ActivationQuant(dtype=INT8)), layout, None), together[part]
        )


def test_rows_are_the_nearest_integers_and_none_saturates() -> None:
    x_TK = torch.randn(9, 300, generator=torch.Generator().manual_seed(4)) * torch.logspace(
        -6, 6, 9
    ).unsqueeze(1)
    rows = quantize(x_TK, ActivationQuant(dtype=INT8))
    assert rows.values_TK.dtype == INT8
    assert torch.equal(rows.values_TK.abs().amax(1), torch.full((9,), 127, dtype=INT8))
    error = (rows.dequantize(torch.float32) - x_TK).abs()
    assert bool((error <= rows.scale_T.unsqueeze(1) * (0.5 + 1e-4)).all())
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert quantize(halves, ActivationQuant(dtype=INT8)).values_TK.tolist() == [
        [127, 0, 2, 2, 0, -2, -126]
    ]  # ties to even
    assert torch.count_nonzero(quantize(torch.zeros(2, 5), ActivationQuant(dtype=INT8)).values_TK) == 0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_stays_broken_and_alone(broken: float) -> None:
    """Integers cannot be NaN; the row's scale is."""
    x_TI = torch.randn(3, 64)
    x_TI[1, 5] = broken
    y_TO = linear(quantize(x_TI, ActivationQuant(dtype=INT8)), packed(8, in_features=64), None)
    assert not torch.isfinite(y_TO[1]).any()
    assert torch.isfinite(y_TO[::2]).all()


def test_rows_of_another_type_are_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="another type"):
        linear(quantize(torch.ones(2, 64), ActivationQuant(dtype=FP8)), packed(8, in_features=64), None)
    with pytest.raises(AssertionError, match="goes with an asymmetric static scale"):
        ActivationQuant(torch.tensor(0.1), INT8, symmetric=False)
    with pytest.raises(AssertionError, match="those of int8"):
        ActivationQuant(symmetric=False)
    with pytest.raises(AssertionError, match="need sums of codes"):
        linear(quantize(torch.ones(2, 64), ASYMMETRIC), packed(8, in_features=64), None)


@each_quant
def test_asymmetric_and_static_rows_are_corrected_exactly(name: str, quant: ActivationQuant) -> None:
    """Against float64 and against the sums of codes less zero points, whose products are whole numbers."""
    layout = packed(37, 20, in_features=1300, name=name)
    rows = quantize(skewed(11, 1300, seed=2), quant)
    levels_TK = rows.values_TK.double() - (0 if rows.zero_T is None else rows.zero_T.double().unsqueeze(1))
    sums_TO = levels_TK @ layout.codes_OI[:57, :1300].double().t()
    exact_TO = sums_TO.float() * rows.scale_T.unsqueeze(1) * layout.scale_O
    assert torch.equal(linear(rows, layout, None), exact_TO)
    assert (layout.sum_O is not None) == (rows.zero_T is not None)
    alone = quantize(skewed(11, 1300, seed=2)[3:4], quant)
    assert torch.equal(linear(alone, layout, None), exact_TO[3:4])


def test_asymmetric_rows_spend_their_range_on_the_numbers_there_are() -> None:
    x_TK = skewed(40, 512, seed=5)
    symmetric = quantize(x_TK, ActivationQuant(dtype=INT8)).dequantize(torch.float32) - x_TK
    rows = quantize(x_TK, ASYMMETRIC)
    error = rows.dequantize(torch.float32) - x_TK
    assert rows.zero_T is not None
    assert error.square().mean() < 0.5 * symmetric.square().mean()
    inside = (rows.values_TK > -128) & (rows.values_TK < 127)  # an end may lie half a step beyond
    assert bool((error.abs() <= rows.scale_T.unsqueeze(1) * torch.where(inside, 0.501, 1.001)).all())
    assert torch.count_nonzero(quantize(torch.zeros(2, 5), ASYMMETRIC).dequantize(torch.float32)) == 0


def test_static_codes_saturate_at_the_ends() -> None:
    x_TK = torch.tensor([[1e9, -1e9, 2.6, -0.013]])
    assert quantize(x_TK, STATIC).values_TK.tolist() == [[127, -128, 124, -1]]
    assert quantize(x_TK, STATIC_ASYMMETRIC).values_TK.tolist() == [[127, -128, 109, -92]]


def test_the_longest_sums_less_zero_points_do_not_overflow() -> None:
    """The sum before its correction is beyond int32, and so is the correction."""
    k = MAX_K_OF["INT8_STATIC_ASYM"]
    w_OI = torch.full((8, k), -128, dtype=INT8)
    sum_O = w_OI.sum(dim=1, dtype=torch.int32)
    layout = PackedInt8(torch.nn.functional.pad(w_OI, (0, -k % 8)), torch.ones(8), torch.float32, sum_O)
    rows = QuantizedRows(
        torch.full((1, k), 127, dtype=INT8), torch.ones(1), torch.full((1,), -128, dtype=torch.int32)
    )
    assert linear(rows, layout, None).unique().tolist() == [float(-255 * 128 * k)]
    for name, most in MAX_K_OF.items():
        problem = Problem("linear", 8, most + 1, 1, 8, True, name, torch.bfloat16, "cpu", 0)
        assert "overflow" in str(refusal(problem))
        assert refusal(replace(problem, k=most)) is None


def test_linears_that_share_an_input_share_a_range_that_covers_all_of_theirs() -> None:
    """Checkpoints of other tools may have several; equal ones keep their numbers."""

    def with_input(scale: float, zero: int) -> QuantizedWeight:
        (weight,) = weights(8, in_features=64)
        zero_point = torch.tensor(zero, dtype=torch.int8)
        return replace(
            weight,
            scheme=SCHEMES["INT8_STATIC_ASYM"],
            input_scale=torch.tensor(scale),
            input_zero_point=zero_point,
        )

    same = input_quant([with_input(0.1, 7), with_input(0.1, 7)], CPU)
    assert same is not None
    assert same.static_scale is not None
    assert same.static_zero is not None
    assert (same.static_scale.item(), same.static_zero.item()) == (torch.tensor(0.1).item(), 7)
    both = input_quant([with_input(0.1, -128), with_input(0.1, 127)], CPU)  # 0 .. 25.5 and -25.5 .. 0
    assert both is not None
    x_TK = torch.tensor([[25.5, -25.5, 0.0]])
    assert (quantize(x_TK, both).dequantize(torch.float32) - x_TK).abs().max() <= 0.11


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("k", [128, 2056, 8192])
@pytest.mark.one_in(4)
def test_rows_prepared_for_a_linear_are_those_of_the_definition(
    k: int,
    normed: bool,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulated_rows(monkeypatch, tmp_path_factory.getbasetemp())
    x_TK = randn(5, k, seed=k) * torch.tensor([1.0, 0.0, 1e-4, 50.0, 3.0]).unsqueeze(1)
    x_TK[4] = x_TK[4].round() / 2
    x_TK[4, 0] = 63.5  # halves, with a scale of 1 / 2
    x_TK = x_TK.to(dtype)
    weight_K = (1 + 0.2 * randn(k, seed=5)).to(dtype) if normed else None
    quant = ActivationQuant(dtype=INT8)
    prepared = prepare_rows(RawRows(x_TK, weight_K, 1e-5, quant))
    expected = quantize(prepare_rows(RawRows(x_TK, weight_K, 1e-5)) if normed else x_TK, quant)
    assert isinstance(prepared, QuantizedRows)
    assert prepared.values_TK.dtype == INT8
    assert torch.equal(prepared.values_TK, expected.values_TK)
    assert torch.equal(prepared.scale_T, expected.scale_T)
    if not normed:
        assert {0, 1, 2} <= set(prepared.values_TK[4].abs().tolist())
    many = prepare_rows(RawRows(x_TK.repeat(4, 1), weight_K, 1e-5, quant))  # a long row by several blocks
    assert isinstance(many, QuantizedRows)
    assert torch.equal(many.values_TK, expected.values_TK.repeat(4, 1))
    assert torch.equal(many.scale_T, expected.scale_T.repeat(4))


@needs_compiler
@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("INT8_")])
@pytest.mark.parametrize(("n", "k", "activation"), [(21, 1296, None), (48, 144, "silu")])
@pytest.mark.one_in(4)
def test_products_in_slices_have_the_bits_of_the_reference(
    name: str,
    n: int,
    k: int,
    activation: str | None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulated(monkeypatch, tmp_path_factory.getbasetemp())
    layout = packed(n, in_features=k, dtype=torch.bfloat16, name=name)
    quant = QUANTS.get(name, ActivationQuant(dtype=INT8))
    rows = quantize(skewed(19, k, seed=3).to(torch.bfloat16), quant)
    whole = linear(rows, layout, None, out_dtype=torch.float32)
    if activation is None:
        residual_TO = randn(19, n, seed=4).to(torch.bfloat16)
        expected = linear(rows, layout, None, residual_TO=residual_TO)
        assert torch.equal(in_slices(rows, layout, None, activation=None, residual_TO=residual_TO), expected)
        assert torch.equal(in_slices(rows, layout, None, activation=None, out_dtype=torch.float32), whole)
    else:
        gate_TF, up_TF = whole.chunk(2, dim=1)
        gated_TF = torch.nn.functional.silu(gate_TF) * up_TF
        y_TF = in_slices(rows, layout, None, activation=activation, out_dtype=torch.float32)
        torch.testing.assert_close(y_TF, gated_TF, rtol=2**-20, atol=1e-30)


@pytest.mark.parametrize("m_max", [1, 128, 4096])
def test_the_reference_serves_a_cpu(m_max: int) -> None:
    problem = Problem("linear", 192, 256, 1, m_max, m_max <= 128, "INT8_DYNAMIC", torch.bfloat16, "cpu", 0)
    assert select(problem).name == "reference.int8"


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("INT8_")])
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("k", "kernels"),
    [
        (256, ("hopper.int8", "triton.int8.prefill")),
        (144, ("cuda.slices.int8", "triton.int8.prefill")),
        (136, ("reference.int8", "int8.cublas")),
    ],
)
def test_a_gpu_has_kernels_of_its_own(k: int, kernels: tuple[str, str], sm: int, name: str) -> None:
    pytest.importorskip("triton")
    decode, prefill = kernels
    decode = "cuda.slices.int8" if sm == 80 and decode == "hopper.int8" else decode
    for phase, expected in (("decode", decode), ("prefill", prefill)):
        asked = KernelDevice("cuda", sm, torch.bfloat16).problem(
            "linear", n=192, k=k, phase=phase, scheme=name
        )
        given = ".given" if name != "INT8_DYNAMIC" and expected == "hopper.int8" else ""
        assert select(asked).name == expected + given
        assert select(asked).prepares == (name == "INT8_DYNAMIC" and expected == "hopper.int8")


@pytest.mark.parametrize("gpu", [Gpu(90, 132, 232448), Gpu(80, 108, 166912)], ids=lambda gpu: f"sm_{gpu.sm}")
def test_tiles_of_a_prompt_are_high_where_they_fill_the_device(gpu: Gpu) -> None:
    high = tile_of(28672, 2048, gpu)
    assert high.rows == 128
    assert tile_of(28672, 2048, gpu, float32=True) != high, "it leaves more shared memory"
    assert tile_of(1024, 64, gpu).rows == 64


class Int8:
    """A source with every linear in INT8, the head too."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.arch = source.arch
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        outer = self._source.outer()
        return {**outer, "head.weight": nearest_weight(dense(outer["head.weight"]), SCHEME, torch.float32)}

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = {name: dense(value) for name, value in self._source.layer(layer_idx).items()}
        return {
            name: nearest_weight(value, SCHEME, torch.float32) if value.dim() == 2 else value
            for name, value in weights.items()
        }


@torch.no_grad()
def test_the_engine_serves_what_the_decoder_computes_of_rounded_inputs() -> None:
    """To float32's precision in most logits: sums in another order move an input over a tie now and then, and
    what follows it with it.
    """
    source = Int8(tiny_source(ARCH))
    unrounded, decoder = (build_decoder(source, dtype=torch.float32, device=CPU) for _ in range(2))
    linears = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 * ARCH.num_layers + 1
    for linear_ in linears:
        linear_.register_forward_pre_hook(
            lambda _, inputs: ((inputs[0] / step(inputs[0])).round() * step(inputs[0]),)
        )
    tokens = tiny_tokens(ARCH, 3, 40, seed=5)
    engine = Engine(source, device=CPU)
    served = engine.runner.score(tokens)
    expected = decoder(tokens)
    of_rounding = (unrounded(tokens) - expected).abs()
    difference = (served - expected).abs()
    assert difference.median() < 1e-4 * of_rounding.median()
    assert difference.max() < of_rounding.max()
    linear_rows = [row for row in engine.kernel_report() if row["op"] == "linear"]
    assert {(row["scheme"], row["kernel"]) for row in linear_rows} == {("INT8_DYNAMIC", "reference.int8")}


def step(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True) / 127
