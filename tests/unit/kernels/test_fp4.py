"""Four-bit floats by 16-bit rows: words that become numbers in registers, and what serves them."""

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import fp4
from compress.kernels.linear.w4a16 import PackedW4, tile_rows
from compress.kernels.problem import PHASES, KernelDevice
from compress.kernels.select import select
from tests.support.random_experts import random_weight
from tests.unit.kernels.test_experts import wide

CPU = torch.device("cpu")
K = 256
MAGNITUDE = {torch.bfloat16: 0x01C0, torch.float16: 0x0E00}
SHIFTS = {torch.bfloat16: ((0, 0), (3, 3), (2, 6), (1, -3)), torch.float16: ((0, 0), (3, 3), (2, 6), (1, 9))}
"""Of `e2m1_numbers`, to the left: of the sign and of the magnitude of each register."""


def in_registers(packed: PackedW4) -> Tensor:
    """Return what `e2m1_numbers` makes of words [tile, block, half, g, t, step]: 16-bit numbers, with axes
    for the register and the half of a word."""
    tiles, blocks, _ = packed.blocks.shape
    words = packed.blocks[..., :1024].contiguous().view(torch.int32).view(tiles, blocks, 2, 8, 4, 4)
    words = words.to(torch.int64) & 0xFFFFFFFF

    def masked(shift: int, mask: int) -> Tensor:
        moved = words << shift if shift >= 0 else words >> -shift
        return moved & (mask << 16 | mask)

    registers = torch.stack(
        [masked(sign, 0x8000) | masked(size, MAGNITUDE[packed.dtype]) for sign, size in SHIFTS[packed.dtype]],
        dim=-1,
    )
    halves = torch.stack([registers & 0xFFFF, registers >> 16], dim=-1)
    return halves.to(torch.uint16).view(packed.dtype)


def scales(packed: PackedW4) -> Tensor:
    """Return the scales [tiles * 16, K / 16 or K / 32]."""
    tiles, blocks, _ = packed.blocks.shape
    pairs = packed.blocks[..., 1024:].contiguous().view(packed.dtype)
    return pairs.view(tiles, blocks, 8, packed.subgroups, 2).permute(0, 4, 2, 1, 3).reshape(tiles * 16, -1)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("NVFP4", torch.bfloat16), ("NVFP4", torch.float16), ("MXFP4", torch.bfloat16)],
)
@pytest.mark.parametrize(("sizes", "gated"), [((48,), False), ((40, 8), False), ((24, 24), True)])
def test_words_and_scales_become_the_weights_exactly(
    scheme: str, dtype: torch.dtype, sizes: tuple[int, ...], gated: bool
) -> None:
    weights = [random_weight((size, K), scheme, dtype, 3 * idx) for idx, size in enumerate(sizes)]
    weights[0].scale_OG[1] *= 2.0**-60 if scheme == "MXFP4" else 2.0**-3
    weights[0].scale_OG[2] = 0
    packed = fp4.repack(weights, dtype=dtype, device=CPU, gated=gated)
    assert packed.subgroups * 32 == packed.blocks.shape[-1] - 1024
    numbers = in_registers(packed)  # tile, block, half, g, t, step, (high column, high row), odd
    numbers = numbers.unflatten(6, (2, 2)).permute(0, 7, 3, 1, 2, 5, 6, 4, 8).reshape(-1, K)
    scale = scales(packed).repeat_interleave(K // scales(packed).shape[1], dim=1)
    w_16 = (numbers.float() * scale.float()).to(dtype)
    assert torch.equal(w_16.double(), numbers.double() * scale.double()), "exact in 16 bits"
    assert float(w_16.abs().max()) < 16
    rows = tile_rows(sum(sizes), gated=gated).flatten()
    there = rows < sum(sizes)
    assert packed.outer_O is not None
    found = w_16.double()[there] * packed.outer_O[rows[there]].double().unsqueeze(1)
    expected = torch.cat([wide(each) for each in weights])[rows[there]]
    torch.testing.assert_close(found, expected, rtol=2.0**-23, atol=0)


def test_hopper_reads_one_layout_for_decode_rows_and_prompts() -> None:
    pytest.importorskip("triton")
    for scheme in fp4.MULTIPLIED:
        device = KernelDevice("cuda", 90, torch.bfloat16)
        kernels = [
            select(device.problem("linear", n=6144, k=4096, phase=phase, scheme=scheme)) for phase in PHASES
        ]
        assert [kernel.name for kernel in kernels] == ["hopper.fp4", "hopper.fp4.dequantize"]
        assert {kernel.repack for kernel in kernels} == {fp4.repack}


@pytest.mark.parametrize(
    ("scheme", "dtype", "n", "k", "name"),
    [
        ("NVFP4", torch.float16, 4096, 4096, "hopper.fp4"),
        ("MXFP4", torch.float16, 4096, 4096, "reference.dequantized.tile4"),
        ("MXFP4", torch.bfloat16, 4096, 2880, "cuda.slices.fp4"),
        ("NVFP4", torch.bfloat16, 4100, 4096, "reference.dequantized.tile4"),
    ],
)
def test_other_sizes_and_dtypes_are_left_to_others(
    scheme: str, dtype: torch.dtype, n: int, k: int, name: str
) -> None:
    device = KernelDevice("cuda", 90, dtype)
    assert select(device.problem("linear", n=n, k=k, scheme=scheme)).name == name


def test_a_scale_fills_the_exponent_of_its_row() -> None:
    given = random_weight((16, K), "MXFP4", torch.bfloat16, 1)
    packed = fp4.repack([given], dtype=torch.bfloat16, device=CPU, gated=False)
    largest = scales(packed).float().amax(dim=1)
    assert bool((largest == 2.0**126).all())
