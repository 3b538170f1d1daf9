"""Row kernels and sampling kernels on a GPU: the references' values, exact quantization, rows that keep their
bits in any company.
"""

import pytest
import torch
from torch import Tensor

from compress.kernels.act_mul.fused import act_mul
from compress.kernels.act_mul.reference import act_mul_rows
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, quantize
from compress.kernels.quantize_rows import fused
from compress.kernels.quantize_rows.fused import quantize_rows
from compress.kernels.rms_norm.fused import rms_norm
from compress.kernels.rms_norm.reference import rms_norm_rows
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows, sample, sample_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
DYNAMIC = ActivationQuant()
SIZES = [1, 65, 4096, 14336, 65536]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device="cuda", dtype=dtype)


def quants() -> list[ActivationQuant]:
    return [DYNAMIC, ActivationQuant(torch.tensor(0.013, device="cuda"))]


def on_cpu(quant: ActivationQuant) -> ActivationQuant:
    return DYNAMIC if quant.static_scale is None else ActivationQuant(quant.static_scale.cpu())


def same_bits(first: Tensor, second: Tensor) -> bool:
    first, second = (
        each.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (first, second)
    )
    return torch.equal(first, second)


def same_rows(actual: Tensor | QuantizedRows, expected: QuantizedRows) -> bool:
    assert isinstance(actual, QuantizedRows)
    return same_bits(actual.values_TK, expected.values_TK) and same_bits(actual.scale_T, expected.scale_T)


def plain(rows: Tensor | QuantizedRows) -> Tensor:
    assert isinstance(rows, Tensor)
    return rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_rows_are_the_definitions_on_a_cpu(size: int, dtype: torch.dtype) -> None:
    spread = torch.tensor([[1.0], [0.0], [200.0], [1e-6], [1e-3]], device="cuda").to(dtype)
    x = randn(5, size, dtype=dtype) * spread
    weight = randn(size, dtype=dtype, seed=1)
    gate_up = torch.cat((x, x.flip(0)), dim=1).clamp(-30, 30)
    for quant in quants():
        exact = on_cpu(quant)
        assert same_rows(quantize_rows(x, quant), quantize(x.cpu(), exact))
        if (
            dtype == torch.float32
        ):  # kernels with and without quantization share their roundings to 16 bits, not every one of float32
            continue
        assert same_rows(
            rms_norm(x, weight, 1e-5, quant), quantize(plain(rms_norm(x, weight, 1e-5)).cpu(), exact)
        )
        assert same_rows(
            act_mul(gate_up, "silu", quant), quantize(plain(act_mul(gate_up, "silu")).cpu(), exact)
        )


def test_e4m3_is_rounded_alike_by_the_instruction_by_integers_and_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(middles, codes[1:]), torch.nextafter(middles, codes[:-1])]
    edges = torch.cat((codes, middles, *near, torch.tensor([1e30, 1e-30, 447.9, 464.0, 500.0])))
    many = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(
        -7, 4, 64
    ).unsqueeze(1)
    for x in (edges.unsqueeze(0), -edges.unsqueeze(0), many):
        for scale in (torch.tensor(1.0), torch.tensor(0.3), torch.tensor(1.7e-5), torch.tensor(3e4)):
            expected = quantize(x * scale, ActivationQuant(scale))
            quant = ActivationQuant(scale.cuda())
            assert same_rows(quantize_rows((x * scale).cuda(), quant), expected)
            with monkeypatch.context() as patched:
                patched.setattr(fused, "converts_e4m3", lambda device: False)
                assert same_rows(quantize_rows((x * scale).cuda(), quant), expected)


def test_a_broken_row_stays_broken() -> None:
    x = randn(3, 4096)
    x[1, 77] = float("nan")
    rows = quantize_rows(x, DYNAMIC)
    assert isinstance(rows, QuantizedRows)
    assert rows.scale_T.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("size", [1, 65, 384, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_act_mul_are_within_a_rounding_of_float64(size: int, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    tiny = 2e-6  # 1 + erf near -1 in float32, and the subnormal numbers of float16, times the other factor
    x = randn(7, size, dtype=dtype)
    weight = randn(size, dtype=dtype, seed=1)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(plain(rms_norm(x, weight, 1e-5)).double(), expected, rtol=4 * eps, atol=tiny)
    gate_up = randn(7, 2 * size, dtype=dtype, seed=2) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    normal = 0.5 * (1 + torch.erf(gate / 2**0.5))
    tanh = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    for name, share in {"silu": gate.sigmoid(), "gelu": normal, "gelu_pytorch_tanh": tanh}.items():
        torch.testing.assert_close(
            plain(act_mul(gate_up, name)).double(), gate * share * up, rtol=4 * eps, atol=4 * tiny
        )


def test_bfloat16_results_are_the_references_but_for_last_bits() -> None:
    """A rounding of the reduction may fall the other way, in one element of a thousand at most; the product
    may make two units of one.
    """
    x = randn(64, 4096)
    weight = randn(4096, seed=1)
    gate_up = randn(64, 8192, seed=2)
    pairs = [(rms_norm(x, weight, 1e-5), rms_norm_rows(x, weight, 1e-5))]
    pairs += [
        (act_mul(gate_up, name), act_mul_rows(gate_up, name))
        for name in ("silu", "gelu", "gelu_pytorch_tanh")
    ]
    for actual, expected in pairs:
        assert float((plain(actual) != plain(expected)).float().mean()) < 1e-3
        torch.testing.assert_close(plain(actual), plain(expected), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("size", [65, 4096, 14336])
def test_rows_keep_their_bits_in_any_company(size: int) -> None:
    x = randn(600, size)
    weight = randn(size, seed=1)
    gate_up = randn(600, 2 * size, seed=2)
    for function in (
        lambda rows: rms_norm(x[rows], weight, 1e-5, DYNAMIC),
        lambda rows: act_mul(gate_up[rows], "silu", DYNAMIC),
        lambda rows: quantize_rows(x[rows], DYNAMIC),
    ):
        whole = function(slice(None))
        assert isinstance(whole, QuantizedRows)
        for rows in (slice(0, 1), slice(599, 600), slice(3, 131), slice(100, 500)):
            assert same_rows(function(rows), QuantizedRows(whole.values_TK[rows], whole.scale_T[rows]))
    x_f32 = x.to(torch.float32)
    weight_f32 = weight.to(torch.float32)
    normed = plain(rms_norm(x_f32, weight_f32, 1e-5))
    for rows in (slice(0, 1), slice(599, 600), slice(3, 131)):  # at size 65 the rows also begin off 16 bytes
        assert same_bits(plain(rms_norm(x_f32[rows], weight_f32, 1e-5)), normed[rows])


@pytest.mark.parametrize("vocab_size", [1, 1013, 128256, 262144])
def test_greedy_is_the_lowest_id_among_the_largest(vocab_size: int) -> None:
    logits = randn(9, vocab_size, dtype=torch.float32).round()  # many equals
    logits[1] = 0.0
    assert torch.equal(
        sample(logits, [SamplingParams(1)] * 9, range(9)).tokens_R.cpu(), logits.cpu().argmax(dim=-1)
    )


def test_every_plan_gives_the_tokens_of_the_cpu_and_can_be_captured() -> None:
    logits = randn(12, 32_000, dtype=torch.float32) * 3
    greedy = [SamplingParams(1)] * 12
    drawn = [
        SamplingParams(1, temperature=0.4 * (row % 4), min_p=0.05 * (row % 3), seed=row << 40)
        for row in range(12)
    ]
    filtered = [
        SamplingParams(1, temperature=0.9, top_k=row % 5 * 10, top_p=1 - 0.05 * row, seed=row)
        for row in range(12)
    ]
    for params in (greedy, drawn, filtered):
        expected = sample(logits.cpu(), params, range(12)).tokens_R
        rows = SamplingRows.of(params, torch.device("cuda"))
        positions = torch.arange(12, device="cuda")
        plan = SamplingPlan.of(params)
        assert torch.equal(sample_rows(logits, rows, positions, plan).tokens_R.cpu(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sample_rows(logits, rows, positions, plan).tokens_R
        captured.fill_(-1)
        graph.replay()
        assert torch.equal(captured.cpu(), expected)
