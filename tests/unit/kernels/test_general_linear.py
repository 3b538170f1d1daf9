"""The Triton linear of every format gives the product in float64 within rounding, in triton's interpreter;
and what serves where no tuned kernel does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.act_mul.reference import act_mul
from compress.kernels.linear import int8, prefill_int8, prefill_widened
from compress.kernels.linear.blocks import Blocks
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, activation_quant, quantize
from compress.kernels.problem import PHASES, KernelDevice
from compress.kernels.select import Kernel, candidates, refusals, select
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.random_experts import randn, random_weight
from tests.support.slow import slow
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.unit.kernels.test_experts import same_bits, wide

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

inside = pytest.mark.skipif(not INTERPRETED, reason="in the child process")
CPU = torch.device("cpu")


def kernel_of(
    name: str | None, dtype: torch.dtype, sizes: Sequence[int], k: int, phase: Any, activation: str | None
) -> Kernel:
    """Return the linear of every size, for decode rows or for prompts."""
    device = KernelDevice("cpu" if INTERPRETED else "cuda", 90, dtype)
    problem = device.problem("linear", n=sum(sizes), k=k, phase=phase, scheme=name, activation=activation)
    served = [each for each in candidates("linear") if each.refusal(problem) is None]
    return next(each for each in served if each.name.startswith(("triton.", "cuda.slices.")))


def rows_of(x_TI: Tensor, name: str | None) -> tuple[Tensor | QuantizedRows, Tensor]:
    """Return rows as a scheme rounds them, and the numbers that they are."""
    scheme = SCHEMES[name] if name is not None else None
    if scheme is None or scheme.activation is None:
        return x_TI, x_TI.double()
    static = torch.tensor(0.02) if scheme.activation == "tensor" else None
    zero = None if scheme.input_symmetric or static is None else torch.tensor(-30)
    rows = quantize(x_TI, activation_quant(scheme, static, zero))
    return rows, rows.dequantize(torch.float64)


def some(rows: Tensor | QuantizedRows, start: int, stop: int) -> Tensor | QuantizedRows:
    return rows[start:stop]


def in_float64(
    x_TI: Tensor, weights: Sequence[Tensor | QuantizedWeight], bias_O: Tensor | None, activation: str | None
) -> Tensor:
    y_TO = x_TI @ torch.cat([wide(each) for each in weights]).t()
    y_TO = y_TO if bias_O is None else y_TO + bias_O.double()
    if activation is None:
        return y_TO
    gated = act_mul(y_TO, activation)
    assert isinstance(gated, Tensor)
    return gated


@inside
@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "k", "bias"),
    [
        (None, torch.float16, (37,), 48, True),
        (None, torch.bfloat16, (40, 40), 80, True),
        ("W4A16_G64", torch.float16, (48, 16), 192, True),
        ("W4A16_G32_ASYM", torch.float16, (24, 24), 160, False),
        ("W3A16_G64_ASYM", torch.float16, (16,), 192, False),
        slow("W2A16_G128", torch.bfloat16, (16, 32), 256, True),
        ("FP8_BLOCK", torch.float16, (144, 48, 16), 256, True),
        ("FP8_STATIC", torch.float16, (21,), 48, False),
        ("INT8_DYNAMIC", torch.float16, (21, 16), 144, True),
        ("W8A16", torch.float16, (21, 16), 144, True),
        ("MXFP4", torch.bfloat16, (16, 32), 160, True),
        ("NVFP4", torch.float16, (48,), 208, False),
        ("MXFP4_W4A4", torch.bfloat16, (16, 32), 160, False),
        slow("MXFP8", torch.bfloat16, (37,), 96, True),
        slow("NVFP4", torch.bfloat16, (16, 16), 384, True),
        slow("W8A16", torch.bfloat16, (37,), 384, False),
        slow("W4A16_CHANNEL", torch.bfloat16, (16,), 80, False),
        slow("W4A16_G128", torch.bfloat16, (300, 4), 384, True),
        slow("FP8_BLOCK", torch.bfloat16, (136, 136), 128, False),
        slow("FP8_BLOCK", torch.bfloat16, (17, 130), 128, False),
        slow("FP8_DYNAMIC", torch.bfloat16, (35, 35), 112, True),
    ],
)
def test_products_of_odd_sizes(
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_row_independent_products(monkeypatch)
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    kernel = kernel_of(name, dtype, sizes, k, "prefill", None)
    assert kernel.repack is not None
    packed = kernel.repack(weights, dtype=dtype, device=CPU, gated=False)
    bias_O = randn(sum(sizes), seed=4).to(dtype) if bias else None
    rows, numbers = rows_of(randn(11, k, seed=1).to(dtype), name)
    expected = in_float64(numbers, weights, bias_O, None)
    residual = randn(*expected.shape, seed=2).to(dtype)
    y_TO = kernel.fn(rows, packed, bias_O, residual_TO=residual)
    assert y_TO.dtype == dtype
    wanted = expected + residual.double()
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < torch.finfo(dtype).eps
    exact = kernel.fn(rows, packed, bias_O, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert float((exact.double() - expected).norm() / expected.norm()) < 1e-5


@inside
@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "k"),
    [
        ("W4A16_G32_ASYM", torch.bfloat16, (48, 16), 160),
        ("W4A16_G64", torch.float16, (16, 32), 192),
        ("W4A16_CHANNEL_ASYM", torch.float16, (16,), 80),
        ("W4A16_CHANNEL", torch.bfloat16, (32,), 144),
        ("W3A16_G128_ASYM", torch.bfloat16, (16,), 640),
        ("W2A16_G64", torch.float16, (16,), 192),
        ("NVFP4", torch.bfloat16, (16, 32), 208),
        ("NVFP4", torch.float16, (48,), 624),
        ("MXFP4", torch.bfloat16, (16, 16), 160),
        ("W8A16", torch.bfloat16, (21, 16), 144),
        ("W8A16", torch.float16, (37,), 528),
    ],
)
def test_prompts_multiply_the_weights_that_codes_stand_for(
    name: str, dtype: torch.dtype, sizes: tuple[int, ...], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    packed = prefill_widened.repack(weights, dtype=dtype, device=CPU, gated=False)
    exact = torch.cat([wide(each) for each in weights])
    found = prefill_widened.dequantize(packed, 0, sum(sizes))
    eps = torch.finfo(dtype).eps
    rounding = eps if dtype == torch.bfloat16 else eps / 2  # the interpreter cuts bfloat16 off
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= exact.abs() * rounding * (1 + 1e-3)).all())
    monkeypatch.setattr(prefill_widened, "MIN_PIECE_ROWS", 32)
    monkeypatch.setattr(prefill_widened, "SCRATCH_BYTES", 0)
    assert [first for first, _ in prefill_widened.pieces(packed)] == list(range(0, sum(sizes), 32))
    bias_O = randn(sum(sizes), seed=4).to(dtype)
    x_TI = randn(prefill_widened.MIN_ROWS, k, seed=1).to(dtype)
    residual = randn(len(x_TI), sum(sizes), seed=2).to(dtype)
    y_TO = prefill_widened.linear(x_TI, packed, bias_O, residual_TO=residual)
    wanted = x_TI.double() @ exact.t() + bias_O.double() + residual.double()
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < 2 * eps


@inside
def test_few_rows_are_multiplied_by_the_product_that_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(blocks: Blocks) -> None:
        raise AssertionError(f"dequantizes {blocks.matrices.format}")

    packed = prefill_widened.repack(
        [random_weight((32, 128), "NVFP4", torch.float16, 0)], dtype=torch.float16, device=CPU, gated=False
    )
    monkeypatch.setattr(prefill_widened, "pieces", refuse)
    prefill_widened.linear(randn(prefill_widened.MIN_ROWS - 1, 128, seed=1).half(), packed, None)
    with pytest.raises(AssertionError, match="dequantizes fp4"):
        prefill_widened.linear(randn(prefill_widened.MIN_ROWS, 128, seed=1).half(), packed, None)


@inside
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(70, 37, 144), (33, 72, 32), (300, 24, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_in_one_pass_has_the_bits_of_the_reference(
    rows: int, n: int, k: int, persistent: bool, symmetric: bool
) -> None:
    dtype = torch.float16  # the interpreter cuts off what bfloat16 has no room for
    name = "INT8_DYNAMIC" if symmetric else "INT8_DYNAMIC_ASYM"
    packed = int8.repack([random_weight((n, k), name, dtype, 3)], dtype=dtype, device=CPU, gated=False)
    x = quantize(randn(rows, k, seed=1).to(dtype) + 1, ActivationQuant(dtype=int8.INT8, symmetric=symmetric))
    residual = randn(rows, n, seed=2).to(dtype)
    tile = prefill_int8.PromptTile(16, 32, 64, 4, 2, persistent)
    for given in ({"residual_TO": residual}, {"out_dtype": torch.float32}, {}):
        y_TO = prefill_int8.linear(x, packed, None, tile=tile, **given)
        assert same_bits(y_TO, int8.linear(x, packed, None, **given)), list(given)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("scheme", "n", "k", "decode", "prefill"),
    [
        ("FP8_BLOCK", 6152, 4096, "cuda.slices.fp8_block", "triton.fp8_block.prefill"),
        ("W4A16_CHANNEL_ASYM", 6144, 2880, "cuda.slices.w4", "w4.dequantize"),
        ("W2A16_G64_ASYM", 6144, 2880, "cuda.slices.w4", "w4.dequantize"),
        ("BF16", 5120, 2880, "cuda.slices.dense16", "dense16.cublas"),
        ("BF16", 49155, 2048, "cuda.slices.dense16", "dense16.cublas"),
        ("W8A16", 6152, 4096, "cuda.slices.w8", "w8.dequantize"),
        ("MXFP4", 6144, 2880, "cuda.slices.fp4", "fp4.dequantize"),
        ("NVFP4", 6144, 2896, "cuda.slices.fp4", "fp4.dequantize"),
        ("NVFP4_W4A4", 6144, 2896, "cuda.slices.fp4.rounded", "triton.fp4.prefill.rounded"),
        (
            "MXFP8",
            6144,
            2848,
            "cuda.slices.dense16.rounded.dequantized",
            "dense16.cublas.rounded.dequantized",
        ),
        ("MXFP8_IN_FLOAT16", 6144, 4096, "reference.dequantized.tile4", "reference.dequantized.tile256"),
    ],
)
def test_what_no_tuned_kernel_serves_it_serves(
    sm: int, scheme: str, n: int, k: int, decode: str, prefill: str
) -> None:
    pytest.importorskip("triton")
    device = KernelDevice("cuda", sm, torch.float16 if scheme.endswith("_IN_FLOAT16") else torch.bfloat16)
    scheme = scheme.removesuffix("_IN_FLOAT16")
    for phase, expected in (("decode", decode), ("prefill", prefill)):
        assert select(device.problem("linear", n=n, k=k, phase=phase, scheme=scheme)).name == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["W4A16_G64", "W4A16_CHANNEL_ASYM", "W3A16_G128", "W2A16_G64_ASYM"])
def test_groups_of_four_bits_are_hoppers_where_blocks_are_whole(scheme: str) -> None:
    """Decode rows and prompts read one layout, on every device."""
    pytest.importorskip("triton")
    for sm, decode, prefill in (
        (80, "cuda.slices.w4", "w4.dequantize"),
        (90, "hopper.w4a16", "w4a16.dequantize"),
    ):
        device = KernelDevice("cuda", sm, torch.bfloat16)
        kernels = [
            select(device.problem("linear", n=6144, k=4096, phase=phase, scheme=scheme)) for phase in PHASES
        ]
        assert [kernel.name for kernel in kernels] == [decode, prefill]
        assert kernels[0].repack is kernels[1].repack


@pytest.mark.parametrize(
    ("scheme", "n", "k", "reason"),
    [
        ("W4A16_G64", 6144, 2848, "K = 2848 is no multiple of the group size 64"),
        ("W4A16_G32", 6150, 2848, "N = 6150 is no multiple of 16"),
        ("W4A16_CHANNEL", 6144, 2840, "K = 2840 is no multiple of 16"),
        ("INT8_DYNAMIC", 6144, 4096, "for weights in the format w4"),
    ],
)
def test_refusals(scheme: str, n: int, k: int, reason: str) -> None:
    pytest.importorskip("triton")
    problem = KernelDevice("cuda", 90, torch.bfloat16).problem("linear", n=n, k=k, scheme=scheme)
    assert refusals(problem)["cuda.slices.w4"] == reason
