"""Four-bit weights by e4m3 rows: words that become e4m3 codes in registers, and the reference product."""

import pytest
import torch

from compress.kernels.linear import w4a8_widened, w4a16
from compress.kernels.linear.w4a8 import repack
from compress.kernels.linear.w4a16 import tile_rows
from compress.kernels.operands.rows import activation_quant, quantize
from compress.kernels.problem import Problem
from compress.kernels.select import select
from compress.quant.scheme import SCHEMES, QuantizedWeight

SCHEME = SCHEMES["W4A8_FP8"]
MASK = 0x87878787


def random_weight(n: int, k: int, seed: int = 0, *, least: int = -7) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(least, 8, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, k // 128, generator=generator) * 0.1 + 0.01
    return QuantizedWeight(SCHEME, codes, scale.to(torch.bfloat16))


def in_registers(words: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Return what `codes_of` makes of words: the e4m3 numbers [..., 2 rows, 4 bytes] times 512."""
    words = words.to(torch.int64) & 0xFFFFFFFF
    turned = (words >> 4) | ((words & 15) << 28)
    rows = torch.stack([words & MASK, turned & MASK], dim=-1)
    rows = rows + (((rows & 0x80808080) >> 7) if wide else 0)
    numbers = (rows.unsqueeze(-1) >> (8 * torch.arange(4))) & 255
    return numbers.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) * 512


@pytest.mark.parametrize("least", [-7, -8])
@pytest.mark.parametrize(("n", "gated"), [(48, False), (64, True), (40, False)])
def test_words_become_the_codes_of_their_rows_and_columns(n: int, gated: bool, least: int) -> None:
    weight = random_weight(n, 256, least=least)
    packed = repack([weight], dtype=torch.bfloat16, device=torch.device("cpu"), gated=gated)
    rows = tile_rows(n, gated=gated)
    blocks = packed.blocks
    assert blocks.shape == (len(rows), 2, 1056)
    words = blocks[..., :1024].contiguous().view(torch.int32).view(len(rows), 2, 2, 8, 4, 2, 2)
    assert packed.wide == (least == -8)
    numbers = in_registers(
        words, wide=packed.wide
    )  # tile, group, half, g, t, step, high column, high row, byte
    there = numbers.permute(0, 7, 3, 1, 2, 5, 6, 4, 8).reshape(len(rows) * 16, 256)
    flat = rows.flatten()
    assert torch.equal(there[flat < n], weight.codes_OI.to(torch.float32)[flat[flat < n]])
    scales = blocks[..., 1024:].contiguous().view(torch.bfloat16).view(len(rows), 2, 8, 2)
    scales = scales.permute(0, 3, 2, 1).reshape(len(rows) * 16, 2)
    assert torch.equal(scales[flat < n], weight.scale_OG[flat[flat < n]])


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_is_the_product_of_the_rounded_rows(rows: int, dtype: torch.dtype) -> None:
    weight = random_weight(64, 256)
    x = quantize(torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)), activation_quant(SCHEME))
    problem = Problem("linear", 64, 256, 1, rows, rows < 128, "W4A8_FP8", dtype, "cpu", 0)
    kernel = select(problem)
    assert kernel.repack is not None
    packed = kernel.repack([weight], dtype=dtype, device=torch.device("cpu"), gated=False)
    y = kernel.fn(x, packed, None)
    exact = x.dequantize(torch.float64) @ weight.dequantize(torch.float64).t()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("m_max", "decode", "name"), [(64, True, "stream.w4a8.widened"), (2048, False, "w4a8.widened")]
)
def test_other_gpus_take_the_kernels_of_w4a16(m_max: int, decode: bool, name: str) -> None:
    problem = Problem("linear", 4096, 4096, 1, m_max, decode, "W4A8_FP8", torch.bfloat16, "cuda", 80)
    assert select(problem).name == name


def test_widened_rows_have_their_product_scaled() -> None:
    weight = random_weight(64, 256)
    x = quantize(torch.randn(3, 256, generator=torch.Generator().manual_seed(1)), activation_quant(SCHEME))
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    packed = w4a16.repack([weight], dtype=torch.bfloat16, device=torch.device("cpu"), gated=False)

    def product(values: torch.Tensor, given: object, bias_O: None, *, out_dtype: torch.dtype) -> torch.Tensor:
        assert given is packed
        return (values.double() @ weight.dequantize(torch.float64).t()).to(out_dtype)

    y = w4a8_widened.linear(x, packed, bias, product=product)
    exact = x.dequantize(torch.float64) @ weight.dequantize(torch.float64).t() + bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=2e-2)


def test_a_prompt_has_kernels_of_its_own_on_hopper() -> None:
    problem = Problem("linear", 4096, 4096, 1, 2048, False, "W4A8_FP8", torch.bfloat16, "cuda", 90)
    assert select(problem).name == "hopper.w4a8.prompts"
