"""The decode linear in slices gives the product in float64 within rounding, and a row's bits depend on the
row alone: on a CPU, by `cuda_emulator.py`. It compiles for every format and tile, and its tiles fit every
device."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.linear.blocks import as_blocks
from compress.kernels.linear.slices import tile_of
from compress.kernels.operands.slices import SLICES, Tile, Variant, steps_of, variant_of
from compress.quant.scale_grid import from_e4m3, to_e4m3
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated
from tests.support.random_experts import randn, random_weight
from tests.support.slow import slow
from tests.unit.kernels.test_experts import same_bits
from tests.unit.kernels.test_general_linear import in_float64, kernel_of, rows_of, some

needs_nvrtc = pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
SHARED_BYTES = 99 * 1024
"""Of a block on the smallest device of sm_80 and newer (8.6)."""
CASES = [
    (None, torch.bfloat16, (48,), 80, None),
    (None, torch.float16, (24, 24), 208, "gelu_pytorch_tanh"),
    ("W4A16_G128", torch.bfloat16, (32,), 384, None),
    ("W4A16_G32_ASYM", torch.float16, (16, 16), 160, "silu"),
    ("W4A16_G64", torch.bfloat16, (32,), 2880, None),
    ("W4A16_CHANNEL_ASYM", torch.bfloat16, (16, 16), 144, "gelu"),
    ("FP8_DYNAMIC", torch.bfloat16, (20,), 336, None),
    ("INT8_DYNAMIC", torch.bfloat16, (13, 8), 336, None),
    ("INT8_DYNAMIC", torch.float16, (24, 24), 1296, "silu"),
    ("INT8_STATIC_ASYM", torch.bfloat16, (13, 8), 336, None),
    ("FP8_BLOCK", torch.bfloat16, (128, 128), 1280, "silu"),
    ("FP8_BLOCK", torch.float16, (40,), 4096, None),
    ("W3A16_G64_ASYM", torch.bfloat16, (16,), 192, None),
    ("W8A16", torch.bfloat16, (21,), 336, None),
    ("W8A16", torch.float16, (24, 24), 1296, "silu"),
    ("MXFP4", torch.bfloat16, (16, 16), 2880, None),
    ("NVFP4", torch.bfloat16, (16, 16), 208, "silu"),
    ("NVFP4", torch.float16, (32,), 1152, None),
]
each_case = pytest.mark.parametrize(("name", "dtype", "sizes", "k", "activation"), CASES)
few_cases = pytest.mark.parametrize(
    ("name", "dtype", "sizes", "k", "activation"),
    [case if idx in (0, 3, 7, 9, 13, 16) else slow(*case) for idx, case in enumerate(CASES)],
)


def variant(
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
    num_rows: int,
) -> tuple[Variant, int]:
    """Return what serves `num_rows` rows, and the steps of its sums."""
    kernel = kernel_of(name, dtype, sizes, k, "decode", activation)
    assert kernel.repack is not None
    weights = [random_weight((size, k), name, dtype, idx) for idx, size in enumerate(sizes)]
    packed = kernel.repack(weights, dtype=dtype, device=torch.device("cpu"), gated=activation is not None)
    blocks = as_blocks(packed)
    tile = tile_of(blocks.matrices, num_rows, gated=activation is not None)
    made = variant_of(
        blocks.matrices,
        tile,
        dtype=dtype,
        activation=activation,
        out_dtype=torch.float32,
        zero_points=blocks.sum_O is not None,
    )
    return made, steps_of(blocks.matrices)


TILES = (
    Tile(1, 1, 1, 1, 8),
    Tile(1, 1, 1, 1, 1),
    Tile(2, 2, 2, 1, 1),
    Tile(4, 1, 3, 1, 1),
    Tile(1, 4, 1, 2, 8),
    Tile(1, 8, 1, 1, 8),
    Tile(1, 1, 2, 1, 8, True),
    Tile(2, 2, 3, 1, 1, True),
    Tile(1, 1, 2, 1, 4),
    Tile(2, 2, 1, 1, 2, True),
)


@pytest.fixture
def emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernel run on this CPU, where fresh memory is NaN."""
    use_emulated(monkeypatch, tmp_path_factory.getbasetemp())
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@needs_compiler
@pytest.mark.usefixtures("emulated")
@few_cases
@pytest.mark.slow
def test_products_and_bits(
    name: str | None, dtype: torch.dtype, sizes: tuple[int, ...], k: int, activation: str | None
) -> None:
    num_rows = 11
    weights = [random_weight((size, k), name, dtype, 7 * idx) for idx, size in enumerate(sizes)]
    kernel = kernel_of(name, dtype, sizes, k, "decode", activation)
    assert kernel.repack is not None
    packed = kernel.repack(weights, dtype=dtype, device=torch.device("cpu"), gated=activation is not None)
    bias_O = randn(sum(sizes), seed=4).to(dtype)
    rows, numbers = rows_of(randn(num_rows, k, seed=1).to(dtype), name)
    expected = in_float64(numbers, weights, bias_O, activation)
    residual = randn(*expected.shape, seed=2).to(dtype)
    y_TO = kernel.fn(rows, packed, bias_O, residual_TO=residual)
    wanted = expected + residual.double()
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < torch.finfo(dtype).eps
    exact = kernel.fn(rows, packed, bias_O, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert float((exact.double() - expected).norm() / expected.norm()) < 1e-5
    for tile in TILES:
        assert same_bits(kernel.fn(rows, packed, bias_O, residual_TO=residual, tile=tile), y_TO), tile
    for start, stop in ((0, 1), (10, 11), (2, 10)):
        part = kernel.fn(some(rows, start, stop), packed, bias_O, residual_TO=residual[start:stop])
        assert same_bits(part, y_TO[start:stop])


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_global_scales_of_other_programs_multiply_outputs() -> None:
    """They are no powers of two, so a scale divided by one is no number of 16 bits."""
    dtype = torch.bfloat16
    weights = []
    for idx, number in enumerate((700.0, 1234.5)):
        made = random_weight((32, 208), "NVFP4", dtype, idx)
        global_scale = torch.tensor(number)
        scale_OG = from_e4m3(to_e4m3(made.scale_OG, global_scale), global_scale)
        weights.append(replace(made, scale_OG=scale_OG, global_scale=global_scale))
    kernel = kernel_of("NVFP4", dtype, (32, 32), 208, "decode", None)
    assert kernel.repack is not None
    packed = kernel.repack(weights, dtype=dtype, device=torch.device("cpu"), gated=False)
    x_TI = randn(5, 208, seed=1).to(dtype)
    expected = in_float64(x_TI.double(), weights, None, None)
    exact = kernel.fn(x_TI, packed, None, out_dtype=torch.float32)
    assert float((exact.double() - expected).norm() / expected.norm()) < 1e-5


@needs_nvrtc
@each_case
@pytest.mark.one_in(6)
def test_the_kernel_compiles(
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compile pairwise: every case for each device and for each number of rows, and all cases together each
    number of rows for each device. What differs by device (how codes become numbers, waits for the launch
    before) does not depend on the tile, which is all that the number of rows decides."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = CASES.index((name, dtype, sizes, k, activation)) % 2
    for turn, num_rows in enumerate((1, 16, 64)):
        made, _ = variant(name, dtype, sizes, k, activation, num_rows)
        assert nvrtc.compile_cubin(made.source, (80, 90)[(first + turn) % 2])[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 90])
def test_a_cap_is_a_constant_of_the_kernel(sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = next(each for each in CASES if each[-1] == "silu")
    plain, _ = variant(*case, 1)
    source = replace(plain, cap=4).source
    assert ("CAP", 4.0) in source.macros
    assert nvrtc.compile_cubin(source, sm) != nvrtc.compile_cubin(plain.source, sm)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 64, 65, 512])
@each_case
def test_sums_fit_the_shared_memory_of_every_device(
    num_rows: int,
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
) -> None:
    made, steps = variant(name, dtype, sizes, k, activation, num_rows)
    assert made.shared_bytes(steps) <= SHARED_BYTES
    assert made.tile.warps <= SLICES


def test_many_outputs_and_rows_give_every_warp_an_item_of_its_own() -> None:
    matrices = as_blocks(torch.empty(4096, 128, dtype=torch.bfloat16)).matrices
    assert [tile_of(matrices, rows, gated=False).parts for rows in (1, 64, 512)] == [8, 8, 1]
