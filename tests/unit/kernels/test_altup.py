"""Kernels of AltUp, of LAuReL's sum and of sparse gates: every one that runs here against the formulas in
float64, and the bits of a row in any company. In triton's interpreter those are the GPU's kernels, too, on a
GPU the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.operands.altup import MOST_NUMBERS, AltUpWeights
from compress.kernels.operands.rows import (
    ActivationQuant,
    Branch,
    LaurelRows,
    QuantizedRows,
    RowNorm,
    quantize,
)
from compress.kernels.problem import KernelDevice, Op, Problem
from compress.kernels.select import Kernel, candidates, refusals, select
from tests.support.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SIZES = [(4, 384), (3, 65), (2, 1)]
"""Streams, and their hidden sizes."""
ROWS = 11


def problem(op: Op, device: str, **sizes: int) -> Problem:
    of_device = KernelDevice.from_torch(torch.device(device), torch.float32)
    return replace(of_device, sm=90 if INTERPRETED else of_device.sm).problem(
        op, **{"n": 384, "k": 4, **sizes}
    )


def each_kernel(op: Op) -> Callable[[Any], Any]:
    """Run a test with every kernel of an op that runs here, in each dtype."""
    cases = [
        pytest.param(kernel, device, dtype, id=f"{kernel.name}-{device}-{name}")
        for kernel in candidates(op)
        for device in DEVICES
        for name, dtype in DTYPES.items()
        if kernel.refusal(problem(op, device)) is None
        and not (INTERPRETED and name == "BF16" and kernel.min_sm)  # the interpreter truncates it
    ]
    return pytest.mark.parametrize(("kernel", "device", "dtype"), cases)


each_size = pytest.mark.parametrize(("n", "size"), SIZES)


@dataclass(frozen=True)
class Inputs:
    """A device and a dtype, in which numbers are drawn."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(device=self.device, dtype=dtype or self.dtype)

    def rows(self, size: int, *, seed: int) -> Tensor:
        """Ordinary rows, one of zeros, a large and a small one."""
        x = self.randn(ROWS, size, seed=seed)
        x[2], x[3], x[5] = 0, x[3] * 100, x[5] * 1e-2
        return x

    def norm(self, size: int, *, seed: int) -> RowNorm:
        return RowNorm(1 + self.randn(size, seed=seed), 1e-5)

    def altup(self, n: int, size: int) -> AltUpWeights:
        router = self.randn(n, size, seed=11) * size**0.5  # of numbers of the order of 1 before tanh
        small = (self.randn(out, n, seed=seed, dtype=torch.float32) for out, seed in ((n * n, 12), (n, 13)))
        return AltUpWeights(self.norm(size, seed=10), router, *small, self.randn(size, seed=14))


def normed(x: Tensor, norm: RowNorm) -> Tensor:
    """The norm of rows in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def routed(x: Tensor, altup: AltUpWeights) -> Tensor:
    return torch.tanh(normed(x, altup.norm) @ altup.router_nD.double().t() / x.shape[-1])


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, *, roundings: int, terms: Tensor | None = None
) -> None:
    """Numbers may be off by so many roundings of the largest number of their row, or of the terms that they
    are sums of, and by two millionths of it for sums in float32."""
    limit = roundings * torch.finfo(dtype).eps + 2e-6
    largest = (expected if terms is None else terms).abs().amax(-1, keepdim=True).clamp(min=1e-3)
    assert actual.shape == expected.shape
    assert float(((actual.double() - expected).abs() / largest).max()) <= limit


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def assert_rows_keep_bits(fn: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> None:
    """Check that results of some of the rows have the bits that they have among all."""
    whole = fn(*rows)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).to(rows[0].device)
    for some in (slice(1), slice(2, 5), order):
        for part, each in zip(fn(*(x[some] for x in rows)), whole, strict=True):
            assert same_bits(part, each[some])
    assert all(len(each) == 0 for each in fn(*(x[:0] for x in rows)))


@each_kernel("altup_predict")
@each_size
def test_streams_are_predicted_and_the_first_is_normed(
    kernel: Kernel, device: str, dtype: torch.dtype, n: int, size: int
) -> None:
    inputs = Inputs(device, dtype)
    streams, altup = inputs.rows(n * size, seed=0), inputs.altup(n, size)
    following = inputs.norm(size, seed=1)
    predicted, rows = kernel.fn(streams, altup, following)
    mixing = (routed(streams[:, :size], altup) @ altup.predict_OI.double().t()).view(ROWS, n, n)
    s = streams.double().view(ROWS, n, size)
    terms = (s.abs() + mixing.abs() @ s.abs()).flatten(1)
    assert_close(predicted, (s + mixing @ s).flatten(1), dtype, roundings=8, terms=terms)
    assert_close(rows, normed(predicted[:, :size], following), dtype, roundings=2)
    alone, nothing = kernel.fn(streams, altup)
    assert nothing is None
    assert_close(alone, predicted.double(), dtype, roundings=2)
    _, quantized = kernel.fn(streams, altup, following, ActivationQuant(dtype=torch.int8))
    assert isinstance(quantized, QuantizedRows)
    expected = quantize(rows, ActivationQuant(dtype=torch.int8))
    codes, codes_of_rows = (each.values_TK.to(torch.float32) for each in (quantized, expected))
    assert float((codes - codes_of_rows).abs().max()) <= 1
    torch.testing.assert_close(quantized.scale_T, expected.scale_T, rtol=1e-2, atol=1e-12)
    assert_rows_keep_bits(lambda x: kernel.fn(x, altup, following), streams)


@each_kernel("altup_correct")
@each_size
def test_streams_are_corrected_and_the_first_is_scaled(
    kernel: Kernel, device: str, dtype: torch.dtype, n: int, size: int
) -> None:
    inputs = Inputs(device, dtype)
    y, predicted = inputs.rows(size, seed=0).flip(0), inputs.rows(n * size, seed=1)
    altup = inputs.altup(n, size)
    streams, read = kernel.fn(y, predicted, altup)
    factors = 1 + routed(y, altup) @ altup.correct_OI.double().t()
    p = predicted.double().view(ROWS, n, size)
    innovation = y.double().unsqueeze(1) - p[:, :1]
    change = factors.unsqueeze(-1) * innovation
    terms = (p.abs() + change.abs()).flatten(1)
    assert_close(streams, (p + change).flatten(1), dtype, roundings=8, terms=terms)
    assert torch.equal(read, streams[:, :size] * altup.scale_D)
    assert_rows_keep_bits(lambda *rows: kernel.fn(*rows, altup), y, predicted)


@each_kernel("altup_add")
@each_size
def test_the_norm_of_a_term_is_added_to_all_streams_but_the_first(
    kernel: Kernel, device: str, dtype: torch.dtype, n: int, size: int
) -> None:
    inputs = Inputs(device, dtype)
    y, streams, norm = inputs.rows(size, seed=0), inputs.rows(n * size, seed=1), inputs.norm(size, seed=2)
    changed = streams.clone()
    assert kernel.fn(y, changed, norm) is changed
    assert same_bits(changed[:, :size], streams[:, :size])
    others = streams[:, size:].double().view(ROWS, n - 1, size) + normed(y, norm).unsqueeze(1)
    assert_close(changed[:, size:], others.flatten(1), dtype, roundings=2)
    assert_rows_keep_bits(lambda y, x: (kernel.fn(y, x.clone(), norm),), y, streams)


def matched(x: Tensor, like: Tensor) -> Tensor:
    """x with the root mean square of another row, float64."""
    square = x.double().square().mean(-1, keepdim=True).clamp(min=1e-5)
    return x.double() * (like.double().square().mean(-1, keepdim=True) / square).sqrt()


@each_kernel("altup_first")
@each_size
def test_streams_begin_with_the_magnitude_of_the_embedding(
    kernel: Kernel, device: str, dtype: torch.dtype, n: int, size: int
) -> None:
    inputs = Inputs(device, dtype)
    x = inputs.rows(size, seed=0)
    products = [inputs.randn(ROWS, size, seed=idx, dtype=torch.float32) for idx in range(1, n)]
    products[0][5] *= 1e-4
    streams = kernel.fn(x, products)
    assert same_bits(streams[:, :size], x)
    expected = torch.cat([matched(each, x) for each in products], dim=1)
    assert_close(streams[:, size:], expected, dtype, roundings=1)
    assert_rows_keep_bits(lambda x, *products: (kernel.fn(x, products),), x, *products)


@each_kernel("altup_join")
@each_size
def test_streams_are_joined_by_the_mean_of_products_of_one_magnitude(
    kernel: Kernel, device: str, dtype: torch.dtype, n: int, size: int
) -> None:
    inputs = Inputs(device, dtype)
    streams = inputs.rows(n * size, seed=0)
    products = [inputs.randn(ROWS, size, seed=idx, dtype=torch.float32) for idx in range(1, n)]
    products[0][5] *= 1e-4
    first = streams[:, :size].double()
    terms = torch.stack([first, *(matched(each, first) for each in products)])
    joined = kernel.fn(streams, products)
    assert_close(joined, terms.sum(0) / n, dtype, roundings=1, terms=terms.abs().sum(0) / n)
    assert_rows_keep_bits(lambda x, *products: (kernel.fn(x, products),), streams, *products)


@each_kernel("post_norm")
@pytest.mark.parametrize("size", [384, 65, 1])
def test_laurel_is_added_to_the_stream_with_the_norm(
    kernel: Kernel, device: str, dtype: torch.dtype, size: int
) -> None:
    inputs = Inputs(device, dtype)
    y, beside, low_rank = (inputs.rows(size, seed=seed) for seed in range(3))
    x = inputs.rows(4 * size, seed=3)[:, size : 2 * size]
    norm, following, own = (inputs.norm(size, seed=seed) for seed in range(4, 7))

    def summed(y: Tensor, x: Tensor, beside: Tensor, low_rank: Tensor) -> tuple[Tensor, Tensor]:
        laurel = LaurelRows(beside, Branch(low_rank, own))
        total, rows, others = kernel.fn(y, x, norm, following, scale=0.75, laurel=laurel)
        assert others == ()
        return total, rows

    total, rows = summed(y, x, beside, low_rank)
    terms = x.double() + beside.double() + normed(low_rank, own) + normed(y, norm)
    assert_close(total, 0.75 * terms, dtype, roundings=4)
    assert_close(rows, normed(total, following), dtype, roundings=2)
    assert_rows_keep_bits(summed, y, x, beside, low_rank)


@each_kernel("act_mul")
@pytest.mark.parametrize("size", [384, 65, 1030])
@pytest.mark.parametrize("sparsity", [0.95, 0.4])
def test_sparse_gates_are_their_excess_over_a_quantile_of_their_row(
    kernel: Kernel, device: str, dtype: torch.dtype, size: int, sparsity: float
) -> None:
    inputs = Inputs(device, dtype)
    x = inputs.rows(2 * size, seed=0)
    x[3] *= 0.3  # its products fit into float16
    x[7] += 3
    gate, up = x.double().chunk(2, dim=1)
    deviation = gate.std(dim=1, correction=0, keepdim=True)
    cut = gate.mean(dim=1, keepdim=True) + NormalDist().inv_cdf(sparsity) * deviation
    sparse = (gate - cut).clamp(min=0)
    expected = sparse * up * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (sparse + 0.044715 * sparse**3))
    actual = kernel.fn(x, "gelu_pytorch_tanh", sparsity=sparsity)
    assert_close(actual, expected, dtype, roundings=4)
    share = float((actual[8:] == 0).float().mean())
    assert share == pytest.approx(sparsity, abs=0.12)
    quantized = kernel.fn(x, "gelu_pytorch_tanh", ActivationQuant(dtype=torch.int8), sparsity=sparsity)
    again = quantize(actual, ActivationQuant(dtype=torch.int8))
    assert float((quantized.values_TK.float() - again.values_TK.float()).abs().max()) <= 1
    assert_rows_keep_bits(lambda x: (kernel.fn(x, "gelu_pytorch_tanh", sparsity=sparsity),), x)


@pytest.mark.parametrize("op", ["altup_predict", "altup_correct"])
@pytest.mark.skipif(not INTERPRETED, reason="no Triton kernel serves a CPU")
def test_streams_that_do_not_fit_into_registers_are_left_to_the_reference(op: Op) -> None:
    assert select(problem(op, "cpu", n=MOST_NUMBERS // 4)).name == "triton.row"
    for sizes in ({"n": MOST_NUMBERS // 4 + 1}, {"n": 8, "k": 9}):
        asked = problem(op, "cpu", **sizes)
        assert select(asked).name == "reference"
        assert f"not {asked.k} of {asked.n}" in refusals(asked)["triton.row"]
