"""Kernels of gated residuals: every one that runs here against the law in float64, and the bits of rows in
company. In triton's interpreter those are the GPU's kernels, too, on a GPU the same.

The interpreter multiplies bfloat16 as integers: float16 and float32 stand in there.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.gated_mix import fused, product
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import PHASES, KernelDevice, Phase
from compress.kernels.select import Kernel, candidates
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {"F32": torch.float32, "F16": torch.float16}
if not INTERPRETED:
    DTYPES["BF16"] = torch.bfloat16
EPS = 1e-5
COLUMNS = 64 if INTERPRETED else fused.COLUMNS
"""Columns of a chunk: few in the interpreter, which takes seconds for as many programs as a GPU has."""
NUM_ROWS = 2 * fused.ROWS + 3 if INTERPRETED else 2 * fused.PROGRAMS * fused.ROWS + 3


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)
        monkeypatch.setattr(fused, "COLUMNS", COLUMNS)
        monkeypatch.setattr(fused, "PROGRAMS", 2)


@dataclass(frozen=True)
class Sizes:
    """Streams, their size, the rank of the gates, and whether the residual is that of the head."""

    num_streams: int
    size: int
    rank: int
    of_head: bool = False


SIZES = {
    "whole tiles": Sizes(4, 64, 32),
    "head": Sizes(4, 64, 32, of_head=True),
    "three streams of several chunks": Sizes(3, COLUMNS + 17, 20),
    "narrow": Sizes(2, 1, 1),
    "a rank of no power of two": Sizes(4, 20, 72),
    "many streams": Sizes(16, 9, 7),
}


def usable() -> list[Any]:
    found = []
    for phase in PHASES:
        for device in DEVICES:
            target = KernelDevice.from_torch(torch.device(device), torch.float32)
            target = replace(target, sm=90) if INTERPRETED else target
            for kernel in candidates("gated_mix"):
                if kernel.refusal(target.problem("gated_mix", n=64, k=32, phase=phase)) is None:
                    found.append(pytest.param(kernel, phase, device, id=f"{kernel.name}-{phase}-{device}"))
    return found


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Residual:
    """The parameters of a gated residual."""

    down: Tensor
    up: Tensor
    inject: Tensor | None
    norm: RowNorm

    @staticmethod
    def of(sizes: Sizes, dtype: torch.dtype, device: str) -> "Residual":
        n, width = sizes.num_streams, sizes.num_streams * sizes.size
        down, up, inject = (
            (randn(rows, columns, seed=seed) * scale * columns**-0.5).to(device, dtype)
            for seed, (rows, columns, scale) in enumerate(
                ((sizes.rank, width, 2 * n), (width, sizes.rank, 2), (n, width, n))
            )
        )
        norm = RowNorm((1 + 0.3 * randn(n, sizes.size, seed=5)).to(device), EPS)
        return Residual(down, up, None if sizes.of_head else inject, norm)

    def packed(self, kernel: Kernel) -> Any:
        assert kernel.repack is not None
        matrices = [each for each in (self.down, self.up, self.inject) if each is not None]
        return kernel.repack(matrices, dtype=self.down.dtype, device=self.down.device, gated=False)

    def in_float64(self, streams_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mixture and the factors of the output."""
        n = len(self.norm.weight)
        x = streams_TE.double().unflatten(1, (n, -1))
        normed = x / (x.square().mean(-1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight.double()
        low = F.silu(normed.flatten(1) @ self.down.double().t() / n)
        gates = torch.sigmoid(low @ self.up.double().t()).unflatten(1, (n, -1))
        mixed = (gates * normed).mean(1)
        if self.inject is None:
            return mixed, None
        return mixed, 2 * torch.sigmoid(normed.flatten(1) @ self.inject.double().t() / n)


def streams_of(sizes: Sizes, dtype: torch.dtype, device: str, num_rows: int = NUM_ROWS) -> Tensor:
    streams = randn(num_rows, sizes.num_streams * sizes.size, seed=9)
    streams[3] *= 1000
    streams[5] *= 1e-3
    streams[6] = 0
    return streams.to(device, dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "phase", "device"), usable())
def test_a_half_layer_reads_the_mean_of_gated_streams(
    kernel: Kernel, phase: Phase, device: str, dtype: str, sizes: Sizes
) -> None:
    del phase
    residual = Residual.of(sizes, DTYPES[dtype], device)
    streams = streams_of(sizes, DTYPES[dtype], device)
    mixed, factors = kernel.fn(streams, residual.packed(kernel), residual.norm)
    expected, expected_factors = residual.in_float64(streams)
    # Normed streams and gates before silu are rounded: each sum has errors of its terms, which average out.
    eps = torch.finfo(DTYPES[dtype]).eps
    width = sizes.num_streams * sizes.size
    step = 4 * eps + 16 * 2.0**-23 * width**0.5
    assert mixed.dtype == DTYPES[dtype]
    torch.testing.assert_close(mixed.double(), expected, rtol=step, atol=step)
    assert (factors is None) == sizes.of_head
    if factors is not None:
        assert factors.dtype == torch.float32
        torch.testing.assert_close(factors.double(), expected_factors, rtol=step, atol=step)
    nothing, of_nothing = kernel.fn(streams[:0], residual.packed(kernel), residual.norm)
    assert nothing.shape == (0, sizes.size)
    assert sizes.of_head or of_nothing.shape == (0, sizes.num_streams)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "phase", "device"), [each for each in usable() if "decode" in each.values]
)
def test_the_bits_of_a_row_are_the_same_in_any_company(
    kernel: Kernel, phase: Phase, device: str, dtype: str, sizes: Sizes
) -> None:
    del phase
    residual = Residual.of(sizes, DTYPES[dtype], device)
    packed = residual.packed(kernel)
    streams = streams_of(sizes, DTYPES[dtype], device)

    def bits(rows: Tensor) -> Tensor:
        mixed, factors = kernel.fn(rows, packed, residual.norm)
        parts = (mixed,) if factors is None else (mixed, factors)
        return torch.cat([each.contiguous().view(torch.uint8) for each in parts], dim=1)

    whole = bits(streams)
    for some in (slice(1), slice(6, 7), slice(3, 20), slice(1, 34), slice(30, None)):
        assert torch.equal(bits(streams[some]), whole[some])
    order = torch.randperm(len(streams), generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(bits(streams[order]), whole[order])
    loud = streams.clone()
    loud[1::2] = float("nan")
    assert torch.equal(bits(loud)[::2], whole[::2])


def test_the_kernels_refuse_the_rows_that_the_other_serves_and_a_wide_rank() -> None:
    target = KernelDevice("cuda", 90, torch.bfloat16)
    for kernel, own, other in ((fused, "decode", "prefill"), (product, "prefill", "decode")):
        assert kernel._refusal(target.problem("gated_mix", n=2048, k=320, phase=own)) is None
        assert kernel._refusal(target.problem("gated_mix", n=2048, k=320, phase=other)) is not None
    refused = fused._refusal(target.problem("gated_mix", n=2048, k=fused.MAX_RANK + 1))
    assert refused is not None
    assert str(fused.MAX_RANK) in refused
