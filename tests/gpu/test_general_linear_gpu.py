"""The linears of every format and size on a GPU: odd shapes against float64, prompts by every way in which
e4m3 is multiplied, and a decode row's bits in any company and by every tile."""

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import general, prefill_widened, slices
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.operands.slices import Tile
from compress.quant.scheme import QuantizedWeight
from tests.support.random_experts import randn, random_weight
from tests.unit.kernels.test_experts import same_bits
from tests.unit.kernels.test_general_linear import in_float64, kernel_of, rows_of, some

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_is_nan")]
CUDA = torch.device("cuda")
ROWS = 512
COMPANIES = ((0, 1), (7, 8), (0, 8), (3, 12), (40, 56), (0, 17), (39, 103), (0, 128), (100, 357), (511, 512))
TILES = (
    Tile(1, 1, 1, 1, 8),
    Tile(1, 2, 2, 2, 8),
    Tile(2, 4, 1, 2, 1),
    Tile(4, 1, 3, 1, 1),
    Tile(1, 8, 1, 1, 8),
)
CASES = [
    (None, torch.bfloat16, (5120,), 2880, None, True),
    (None, torch.float16, (501, 500), 48, None, True),
    (None, torch.bfloat16, (720, 720), 336, "gelu_pytorch_tanh", True),
    ("W4A16_G64", torch.bfloat16, (1024, 256, 256), 2880, None, True),
    ("W4A16_G32_ASYM", torch.float16, (112, 112), 160, "silu", False),
    ("W4A16_CHANNEL", torch.bfloat16, (304,), 720, None, False),
    ("W4A16_G128", torch.bfloat16, (8192, 8192), 512, "silu", False),
    ("FP8_BLOCK", torch.bfloat16, (4096, 1024, 1024), 4096, None, True),
    ("FP8_BLOCK", torch.float16, (136, 136), 384, "silu", False),
    ("FP8_BLOCK", torch.bfloat16, (17, 130), 128, None, False),
    ("FP8_DYNAMIC", torch.bfloat16, (2880,), 720, None, True),
    ("FP8_STATIC", torch.bfloat16, (35, 35), 112, "gelu", True),
    ("INT8_DYNAMIC", torch.bfloat16, (2880,), 720, None, True),
    ("INT8_DYNAMIC", torch.float16, (40, 40), 144, "silu", True),
    ("INT8_DYNAMIC_ASYM", torch.bfloat16, (40, 40), 144, "silu", True),
    ("INT8_DYNAMIC", torch.bfloat16, (4096, 1021), 4096, None, False),
    ("W8A16", torch.bfloat16, (4096, 1021), 4096, None, True),
    ("W8A16", torch.float16, (40, 40), 144, "silu", False),
    ("MXFP4", torch.bfloat16, (1024, 256, 256), 2880, None, True),
    ("NVFP4", torch.bfloat16, (4096, 4096), 4096, "silu", False),
    ("NVFP4", torch.float16, (304,), 720, None, True),
]


def on_gpu(rows: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
    if isinstance(rows, Tensor):
        return rows.to(CUDA)
    zero_T = None if rows.zero_T is None else rows.zero_T.to(CUDA)
    return QuantizedRows(rows.values_TK.to(CUDA), rows.scale_T.to(CUDA), zero_T)


def moved(each: Tensor | QuantizedWeight) -> Tensor:
    return each.to(CUDA) if isinstance(each, Tensor) else each.dequantize(torch.float32).to(CUDA)


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "k", "activation", "bias"),
    [each for each in CASES if (each[0] or "").startswith(("W4", "W8", "MXFP4", "NVFP4"))],
)
def test_prompts_that_dequantize_first(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every weight is the nearest number of 16 bits; with pieces, a bias, a residual, and float32 results."""
    del activation
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    packed = prefill_widened.repack(weights, dtype=dtype, device=CUDA, gated=False)
    exact = torch.cat([moved(each) for each in weights]).double()
    found = prefill_widened.dequantize(packed, 0, sum(sizes))
    assert bool(((found.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.001).all())
    monkeypatch.setattr(prefill_widened, "MIN_PIECE_ROWS", 1024)
    monkeypatch.setattr(prefill_widened, "SCRATCH_BYTES", 0)
    bias_O = randn(sum(sizes), seed=4).to(CUDA, dtype) if bias else None
    x_TI = randn(prefill_widened.MIN_ROWS + 13, k, seed=1).to(CUDA, dtype)
    residual = randn(len(x_TI), sum(sizes), seed=2).to(CUDA, dtype)
    expected = x_TI.double() @ exact.t() + (0 if bias_O is None else bias_O.double())
    for out_dtype, added in ((None, residual), (torch.float32, None)):
        y_TO = prefill_widened.linear(x_TI, packed, bias_O, residual_TO=added, out_dtype=out_dtype)
        wanted = expected if added is None else expected + added.double()
        assert y_TO.dtype == (out_dtype or dtype)
        assert float((y_TO.double() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("name", "dtype", "sizes", "k", "activation", "bias"), CASES)
def test_products_and_bits(
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
    bias: bool,
    phase: str,
    by_bits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_bits:
        if name is None or not name.startswith("FP8"):
            pytest.skip("no e4m3")
        if phase == "decode":
            pytest.skip("one way for decode rows")
        monkeypatch.setattr(general, "e4m3_factors", lambda device, native: "bits")
    if phase == "prefill" and name is None:
        pytest.skip("a library multiplies prompts by weights of 16 bits")
    activation = activation if phase == "decode" else None
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    kernel = kernel_of(name, dtype, sizes, k, phase, activation)
    assert kernel.repack is not None
    packed = kernel.repack(weights, dtype=dtype, device=CUDA, gated=activation is not None)
    bias_O = randn(sum(sizes), seed=4).to(dtype).to(CUDA) if bias else None
    cpu_rows, numbers = rows_of(randn(ROWS, k, seed=1).to(dtype), name)
    rows = on_gpu(cpu_rows)
    expected = in_float64(numbers.to(CUDA), [moved(each) for each in weights], bias_O, activation)
    residual = randn(*expected.shape, seed=2).to(dtype).to(CUDA)
    y_TO = kernel.fn(rows, packed, bias_O, residual_TO=residual)
    wanted = expected + residual.double()
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < torch.finfo(dtype).eps
    exact = kernel.fn(rows, packed, bias_O, out_dtype=torch.float32)
    native = phase == "prefill" and name is not None and name.startswith("FP8") and not by_bits
    limit = 1e-3 if native else 1e-5  # Hopper's FP8 tensor cores keep 14 bits
    assert float((exact.double() - expected).norm() / expected.norm()) < limit
    if phase == "decode":
        for start, stop in COMPANIES:
            part = kernel.fn(some(rows, start, stop), packed, bias_O, residual_TO=residual[start:stop])
            assert same_bits(part, y_TO[start:stop]), (start, stop)
        for tile in TILES:
            again = slices.linear(
                rows, packed, bias_O, activation=activation, residual_TO=residual, tile=tile
            )
            assert same_bits(again, y_TO), tile
