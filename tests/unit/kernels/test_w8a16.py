"""Int8 weights by 16-bit rows on Hopper: bytes that become numbers in registers, and prompts over the same
bytes."""

import pytest
import torch
from torch import Tensor

from compress.kernels.linear import prefill_widened, w8a16
from compress.kernels.linear.blocks import Blocks
from compress.kernels.problem import PHASES, KernelDevice
from compress.kernels.select import select
from tests.support.random_experts import random_weight
from tests.support.triton_interpreter import INTERPRETED
from tests.unit.kernels.test_experts import wide

CPU = torch.device("cpu")
K = 256
DTYPES = [torch.bfloat16, torch.float16]


def packed_of(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Blocks, Tensor]:
    """Return weights in the layout, and their numbers in float64."""
    weights = [random_weight((size, K), "W8A16", dtype, 3 * idx) for idx, size in enumerate(sizes)]
    packed = w8a16.repack(weights, dtype=dtype, device=CPU, gated=False)
    return packed, torch.cat([wide(each) for each in weights])


def in_registers(packed: Blocks) -> Tensor:
    """Return what `int8_numbers` makes of the four bytes that a matrix load gives thread t of a row, and
    where they are multiplied: columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step (PTX, m64n8k16)."""
    bytes_OI = packed.matrices.data[0].to(torch.int32)
    if packed.dtype == torch.bfloat16:
        assert bool((bytes_OI.to(torch.int16).view(torch.bfloat16).double() == bytes_OI * 2.0**-133).all())
        numbers = bytes_OI.double() * 2.0**-133 * 2.0**127 - 2.0
    else:
        numbers = (bytes_OI | 0x6400).to(torch.int16).view(torch.float16).double() - 1152
    step = numbers.unflatten(1, (-1, 4, 4))  # step, t, byte
    out = torch.empty_like(step.flatten(-2))
    for t in range(4):
        for byte, column in enumerate((2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)):
            out[..., column] = step[..., t, byte]
    return out.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_become_the_codes_of_their_columns_exactly(dtype: torch.dtype) -> None:
    packed, exact = packed_of((48, 16), dtype)
    numbers = in_registers(packed)
    assert torch.equal(numbers.to(dtype).double(), numbers), "exact in 16 bits"
    unit = 64.0 if dtype == torch.bfloat16 else 1.0
    scale = packed.kernel_weight.scale_O
    assert scale is not None
    torch.testing.assert_close(numbers * unit * scale.double().view(-1, 1), exact, rtol=2.0**-23, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="in the child process")
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_dequantize_the_same_bytes(dtype: torch.dtype) -> None:
    packed, exact = packed_of((21, 16), dtype)
    limit = torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off
    found = prefill_widened.dequantize(packed, 0, 37)
    assert bool(((found.double() - exact).abs() <= exact.abs() * limit * (1 + 1e-3)).all())
    x_TI = torch.randn(prefill_widened.MIN_ROWS, K, generator=torch.Generator().manual_seed(1))
    y_TO = prefill_widened.linear(x_TI.to(dtype), packed, None)
    wanted = x_TI.to(dtype).double() @ exact.t()
    assert float((y_TO.double() - wanted).norm() / wanted.norm()) < 2 * limit


def test_hopper_reads_one_layout_for_decode_rows_and_prompts() -> None:
    pytest.importorskip("triton")
    device = KernelDevice("cuda", 90, torch.bfloat16)
    kernels = [
        select(device.problem("linear", n=6144, k=4096, phase=phase, scheme="W8A16")) for phase in PHASES
    ]
    assert [kernel.name for kernel in kernels] == ["hopper.w8a16", "hopper.w8a16.dequantize"]
    assert {kernel.repack for kernel in kernels} == {w8a16.repack}
    for sm, n, k in ((80, 6144, 4096), (90, 6152, 4096), (90, 6144, 4112)):
        problem = KernelDevice("cuda", sm, torch.bfloat16).problem("linear", n=n, k=k, scheme="W8A16")
        assert select(problem).name == "cuda.slices.w8"
