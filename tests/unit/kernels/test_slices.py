"""The decode linear in slices: it compiles for every format and tile, and its tiles fit every device. How it
computes is tested on a GPU (`tests/gpu/test_general_linear_gpu.py`)."""

from pathlib import Path

import pytest
import torch

from compress.kernels.compilers import nvrtc
from compress.kernels.linear.blocks import as_blocks
from compress.kernels.linear.slices import SLICES, Tile, Variant, steps_of, tile_of, variant_of
from tests.unit.kernels.test_experts import weight
from tests.unit.kernels.test_general_linear import kernel_of

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
    ("FP8_BLOCK", torch.bfloat16, (128, 128), 1280, "silu"),
    ("FP8_BLOCK", torch.float16, (40,), 4096, None),
]
each_case = pytest.mark.parametrize(("name", "dtype", "sizes", "k", "activation"), CASES)


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
    weights = [weight((size, k), name, dtype, idx) for idx, size in enumerate(sizes)]
    packed = kernel.repack(weights, dtype=dtype, device=torch.device("cpu"), gated=activation is not None)
    blocks = as_blocks(packed)
    tile = tile_of(blocks.matrices, num_rows, gated=activation is not None)
    return variant_of(blocks, tile, activation, torch.float32), steps_of(blocks.matrices)


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 90])
@each_case
def test_the_kernel_compiles(
    sm: int,
    name: str | None,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    k: int,
    activation: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for num_rows in (1, 16, 64):
        made, _ = variant(name, dtype, sizes, k, activation, num_rows)
        assert nvrtc.compile_cubin(made.source, sm)[:4] == b"\x7fELF"


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
    assert [tile_of(matrices, rows, gated=False).split for rows in (1, 64, 512)] == [True, True, False]


def test_tiles_count_warps() -> None:
    assert Tile(1, 1, 1, 1, True).warps == SLICES
    assert Tile(1, 1, 1, 1, False).warps < SLICES
