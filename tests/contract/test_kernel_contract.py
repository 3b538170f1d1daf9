"""What every kernel owes: the value of its op in float64 within rounding, rows that do not feel one another,
reasons for refusals.

Runs on the CPU, and on the GPU where there is one. Fresh memory is filled with NaN, so that an element a
kernel does not write is seen. On a GPU the shapes are few: a fast kernel is compiled for every one of them,
and `tests/gpu` goes through its own ranges.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels import select as select_module
from compress.kernels.operands.hyper import HyperWeights, unpacked_factors
from compress.kernels.operands.paged import CODED_FORMATS, TOKEN_HEAD_FORMATS, PagedKV, empty_pages
from compress.kernels.operands.rows import (
    FP8,
    INT8,
    ActivationQuant,
    Branch,
    RowNorm,
    activation_quant,
    quantize,
)
from compress.kernels.problem import OPS, Problem
from compress.kernels.select import KERNELS, Kernel, anything, candidates, refusals, select
from compress.models.hyper_connection import HyperConnections, coefficients
from compress.plugins import PluginSet
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
SHAPES = {"cpu": [(1024, 384), (193, 65), (7, 129), (8192, 384)], "cuda": [(1024, 384), (193, 65)]}


def sm_of(device: str) -> int:
    return (
        0
        if device == "cpu"
        else 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    )


def problem(op: Any, device: str, dtype: str, **facts: Any) -> Problem:
    defaults = {"n": 64, "k": 64, "m_min": 1, "m_max": 8, "row_invariant": True, "scheme": dtype}
    return Problem(op=op, dtype=DTYPES[dtype], device=device, sm=sm_of(device), **{**defaults, **facts})


def usable(op: Any, **facts: Any) -> list[tuple[str, Kernel, str, str]]:
    return [
        (kernel.name, kernel, device, dtype)
        for kernel in candidates(op)
        for device in DEVICES
        for dtype in DTYPES
        if kernel.refusal(problem(op, device, dtype, **facts)) is None
    ]


def each_usable(cases: list[tuple[str, Kernel, str, str]]) -> Any:
    return pytest.mark.parametrize(
        ("kernel", "device", "dtype"),
        [case[1:] for case in cases],
        ids=["-".join((c[0], *c[2:])) for c in cases],
    )


LINEARS = {
    "-".join(map(str, (case[0], *case[2:], n, k, m_max))): (*case[1:], n, k, m_max)
    for m_max in (8, 4096)
    for n, k in SHAPES["cpu"]
    for case in usable("linear", m_max=m_max, row_invariant=m_max == 8, n=n, k=k)
    if (n, k) in SHAPES[case[2]]
}


def randn(*shape: int, device: str, dtype: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        device=device, dtype=DTYPES[dtype]
    )


def assert_close(actual: Tensor, expected_f64: Tensor, *, depth: int, dtype: str, factors: int = 0) -> None:
    """c eps sqrt(K) absmax, plus one rounding of the result, plus one of each term for each of `factors`
    (errors of terms average out).
    """
    eps = torch.finfo(DTYPES[dtype]).eps
    accumulated = (4 * torch.finfo(torch.float32).eps * depth**0.5 + factors * eps) * float(
        expected_f64.abs().max()
    )
    assert actual.dtype == DTYPES[dtype]
    torch.testing.assert_close(
        actual.to(torch.float64),
        expected_f64,
        rtol=4 * eps,
        atol=accumulated + eps * float(expected_f64.abs().max()),
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kernel", "device", "dtype", "n", "k", "m_max"), LINEARS.values(), ids=LINEARS)
def test_linear_is_the_product_and_decode_rows_are_independent(
    kernel: Kernel, device: str, dtype: str, n: int, k: int, m_max: int
) -> None:
    assert kernel.repack is not None
    w_OI = randn(n, k, device=device, dtype=dtype)
    bias_O = randn(n, device=device, dtype=dtype, seed=1)
    x_TI = randn(40, k, device=device, dtype=dtype, seed=2)
    residual_TO = randn(40, n, device=device, dtype=dtype, seed=3)
    packed = kernel.repack(
        [w_OI[:3], w_OI[3:]], dtype=DTYPES[dtype], device=torch.device(device), gated=False
    )
    y_TO = kernel.fn(x_TI, packed, bias_O)
    expected = F.linear(x_TI.double(), w_OI.double(), bias_O.double())
    assert_close(y_TO, expected, depth=k, dtype=dtype)
    assert_close(
        kernel.fn(x_TI, packed, bias_O, residual_TO=residual_TO),
        expected + residual_TO.double(),
        depth=k,
        dtype=dtype,
    )
    assert kernel.fn(x_TI, packed, bias_O, out_dtype=torch.float32).dtype == torch.float32
    if m_max > 8 and not kernel.name.startswith("reference"):
        return
    for num_rows in range(1, 41):
        assert same_bits(kernel.fn(x_TI[:num_rows], packed, bias_O), y_TO[:num_rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).to(device)
    assert same_bits(kernel.fn(x_TI[order], packed, bias_O), y_TO[order])
    loud = x_TI.clone()
    loud[1::2] *= 1e6
    assert same_bits(kernel.fn(loud, packed, bias_O)[::2], y_TO[::2])


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m_max", [8, 4096])
def test_quantized_linear_is_the_product_with_the_dequantized_weight(
    scheme: Any, device: str, m_max: int
) -> None:
    kernel = select(
        problem(
            "linear", device, "BF16", n=192, k=256, m_max=m_max, row_invariant=m_max == 8, scheme=scheme.name
        )
    )
    assert kernel.repack is not None
    parts: list[QuantizedWeight] = []
    for seed, rows in ((0, 128), (1, 64)):
        w_OI = randn(rows, 256, device="cpu", dtype="BF16", seed=seed)
        scale_OG, zero_point_OG = min_max_scale(grouped(w_OI, scheme), scheme, torch.bfloat16)
        parts.append(round_to_nearest(w_OI, scheme, scale_OG, zero_point_OG))
    x = randn(11, 256, device=device, dtype="BF16", seed=2)
    global_scale = torch.tensor(64.0, device=device) if scheme.has_input_global_scale else None
    quant = None if scheme.activation is None else activation_quant(scheme, global_scale=global_scale)
    rows = None if quant is None else quantize(x, quant)
    packed = kernel.repack(parts, dtype=torch.bfloat16, device=torch.device(device), gated=False)
    y_TO = kernel.fn(x if rows is None else rows, packed, None)
    w_OI = torch.cat([part.dequantize(torch.float32) for part in parts]).to(device).double()
    x_TI = x.double() if rows is None else rows.dequantize(torch.float32).double()
    # Weights may be rounded to bfloat16 once, or enter as codes: an error of half a unit in each factor,
    # averaged over K.
    assert_close(y_TO, x_TI @ w_OI.t(), depth=256, dtype="BF16", factors=1)


@each_usable(usable("rms_norm"))
@pytest.mark.parametrize("size", [384, 65, 1])
def test_rms_norm(kernel: Kernel, device: str, dtype: str, size: int) -> None:
    x = randn(40, size, device=device, dtype=dtype)
    weight = randn(size, device=device, dtype=dtype, seed=1)
    x[3] *= 1000
    y = kernel.fn(x, weight, 1e-5)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(y, expected, depth=size, dtype=dtype)
    for num_rows in range(1, 41):
        assert same_bits(kernel.fn(x[:num_rows], weight, 1e-5), y[:num_rows])


def normed_f64(x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
    x = x.double() - (x.double().mean(-1, keepdim=True) if centered else 0)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@each_usable(usable("rms_norm"))
@pytest.mark.parametrize("size", [384, 65, 1])
@pytest.mark.parametrize("centered", [False, True])
def test_norms_with_float32_weights_and_of_centered_rows(
    kernel: Kernel, device: str, dtype: str, size: int, centered: bool
) -> None:
    x = randn(40, size, device=device, dtype=dtype)
    weight = 1 + randn(size, device=device, dtype="F32", seed=1)
    x[3] *= 1000
    y = kernel.fn(x, weight, 1e-5, centered=centered)
    assert_close(y, normed_f64(x, weight, 1e-5, centered=centered), depth=size, dtype=dtype)
    for num_rows in (1, 7, 39):
        assert same_bits(kernel.fn(x[:num_rows], weight, 1e-5, centered=centered), y[:num_rows])
    bias = randn(size, device=device, dtype="F32", seed=7)
    biased = kernel.fn(x, weight, 1e-5, centered=centered, bias=bias)
    expected = normed_f64(x, weight, 1e-5, centered=centered) + bias.double()
    assert_close(biased, expected, depth=size, dtype=dtype)


@each_usable(usable("post_norm"))
@pytest.mark.parametrize("size", [384, 65, 1])
@pytest.mark.parametrize("wide", [False, True], ids=["weights like rows", "float32 weights"])
@pytest.mark.parametrize("centered", [False, True])
def test_post_norm_is_the_sum_with_the_norm_and_the_norm_that_follows(
    kernel: Kernel, device: str, dtype: str, size: int, wide: bool, centered: bool
) -> None:
    y, x = (randn(40, size, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    y[3] *= 1000
    norm, following = (
        RowNorm(1 + randn(size, device=device, dtype="F32" if wide else dtype, seed=seed), eps, centered)
        for seed, eps in ((2, 1e-5), (3, 1e-3))
    )
    total, rows, others = kernel.fn(y, x, norm, following)
    assert others == ()
    expected = normed_f64(y, norm.weight, 1e-5, centered=centered).to(DTYPES[dtype]).double() + x.double()
    assert_close(total, expected, depth=size, dtype=dtype, factors=2)
    assert_close(
        rows, normed_f64(total, following.weight, 1e-3, centered=centered), depth=size, dtype=dtype, factors=1
    )
    quantized_total, quantized, _ = kernel.fn(y, x, norm, following, ActivationQuant())
    assert same_bits(quantized_total, total)
    again = quantize(rows, ActivationQuant())
    assert same_bits(quantized.values_TK, again.values_TK)
    assert same_bits(quantized.scale_T, again.scale_T)
    for num_rows in (1, 7, 39):
        part, part_rows, _ = kernel.fn(y[:num_rows], x[:num_rows], norm, following)
        assert same_bits(part, total[:num_rows])
        assert same_bits(part_rows, rows[:num_rows])
    alone, nothing, _ = kernel.fn(y, x, norm)
    assert nothing is None
    assert same_bits(alone, total)
    scaled, scaled_rows, _ = kernel.fn(y, x, norm, following, scale=0.40625)
    assert same_bits(scaled, total * 0.40625)
    assert_close(
        scaled_rows,
        normed_f64(scaled, following.weight, 1e-3, centered=centered),
        depth=size,
        dtype=dtype,
        factors=1,
    )


@each_usable(usable("post_norm"))
@pytest.mark.parametrize("size", [384, 65, 1])
@pytest.mark.parametrize("centered", [False, True])
def test_post_norm_of_branches_is_that_of_the_sum_of_their_norms_and_norms_the_stream_for_others(
    kernel: Kernel, device: str, dtype: str, size: int, centered: bool
) -> None:
    a, b, x = (randn(40, size, device=device, dtype=dtype, seed=seed) for seed in range(3))
    a[3] *= 1000
    of_a, of_b, norm, following, second, third = (
        RowNorm(1 + randn(size, device=device, dtype=kind, seed=3 + seed), eps, centered)
        for seed, (kind, eps) in enumerate(
            [(dtype, 1e-5), ("F32", 1e-4), (dtype, 1e-5), (dtype, 1e-3), ("F32", 1e-2), (dtype, 1e-6)]
        )
    )
    branches = (Branch(a, of_a), Branch(b, of_b))
    total, rows, others = kernel.fn(branches, x, norm, following, also=(second, third), scale=0.40625)
    normed_a, normed_b = (
        normed_f64(values, each.weight, each.eps, centered=centered).to(DTYPES[dtype])
        for values, each in ((a, of_a), (b, of_b))
    )
    y = normed_a + normed_b
    expected = normed_f64(y, norm.weight, norm.eps, centered=centered).to(DTYPES[dtype]).double() + x.double()
    assert_close(total, expected * 0.40625, depth=size, dtype=dtype, factors=4)
    for actual, each in zip((rows, *others), (following, second, third), strict=True):
        of_total = normed_f64(total, each.weight, each.eps, centered=centered)
        assert_close(actual, of_total, depth=size, dtype=dtype, factors=1)
    alone, alone_rows, (only,) = kernel.fn(branches, x, norm, also=(second,), scale=0.40625)
    assert alone_rows is None
    assert same_bits(alone, total)
    assert same_bits(only, others[0])
    for num_rows in (1, 7, 39):
        some = tuple(Branch(each.values_TD[:num_rows], each.norm) for each in branches)
        part = kernel.fn(some, x[:num_rows], norm, following, also=(second, third), scale=0.40625)
        for actual, whole in zip((*part[:2], *part[2]), (total, rows, *others), strict=True):
            assert same_bits(actual, whole[:num_rows])


STREAMS = {
    "as they are": (HyperConnections(4, 1e-6, post_eps=1e-6, post_factor=1.7), 384),
    "mixed": (HyperConnections(4, 1e-6, sinkhorn_iterations=20), 192),
    "three, mixed once": (HyperConnections(3, 1e-3, sinkhorn_iterations=1), 65),
    "two narrow ones": (HyperConnections(2, 1e-5), 1),
}


def hyper_weights(facts: HyperConnections, size: int, device: str, *, of_head: bool = False) -> HyperWeights:
    shapes = facts.shapes(size, of_head=of_head)
    weight, bias, gains = (
        randn(*shapes[leaf], device=device, dtype="F32", seed=seed)
        for seed, leaf in enumerate(("weight", "bias", "gains"), start=11)
    )
    return HyperWeights(facts, 1e-5, weight / (facts.num_streams * size) ** 0.5, bias, 1 + 0.3 * gains)


@each_usable(usable("hyper_mix"))
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("of_head", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["weights like rows", "float32 weights"])
def test_a_half_layer_reads_the_norm_of_a_mixture_of_the_streams(
    kernel: Kernel, device: str, dtype: str, streams: str, of_head: bool, wide: bool
) -> None:
    facts, size = STREAMS[streams]
    n = facts.num_streams
    x = randn(40, n * size, device=device, dtype=dtype)
    x[3] *= 1000
    hyper = hyper_weights(facts, size, device, of_head=of_head)
    norm = RowNorm(1 + randn(size, device=device, dtype="F32" if wide else dtype, seed=1), 1e-3)
    rows, factors = kernel.fn(x, hyper, norm)
    inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + hyper.norm_eps)
    logits = x.double() @ hyper.weight_ME.double().t() * inverse
    expected = coefficients(facts, logits, hyper.bias_M.double(), hyper.gains.double())
    mixture = (expected.pre.unsqueeze(-1) * x.double().view(40, n, size)).sum(1)
    # the rounding of a mixture is that of its largest stream, which may be far above the mixture
    spread = x.double().view(40, n, size).abs().amax(1) / mixture.square().mean(-1, keepdim=True).sqrt()
    of_mixture = normed_f64(mixture, norm.weight, norm.eps, centered=False)
    eps = torch.finfo(DTYPES[dtype]).eps
    excess = (rows.double() - of_mixture).abs() / (1 + of_mixture.abs() + spread)
    assert float(excess.max()) <= 8 * (eps + 2.0**-23 * (n * size) ** 0.5)
    if of_head:
        assert factors is None
    else:
        assert expected.post is not None
        assert factors.dtype == torch.float32
        found = unpacked_factors(factors, n)
        atol = 16 * 2.0**-23 * (n * size) ** 0.5
        torch.testing.assert_close(found.post.double(), expected.post, rtol=0, atol=atol)
        assert (found.mixing is None) == (expected.mixing is None)
        if expected.mixing is not None:
            torch.testing.assert_close(found.mixing.double(), expected.mixing, rtol=0, atol=atol)
    quantized, again = kernel.fn(x, hyper, norm, ActivationQuant())
    assert same_bits(quantized.values_TK, quantize(rows, ActivationQuant()).values_TK)
    assert of_head or same_bits(again, factors)
    for some in (slice(1), slice(7), slice(5, 39)):
        part, part_factors = kernel.fn(x[some], hyper, norm)
        assert same_bits(part, rows[some])
        assert of_head or same_bits(part_factors, factors[some])


@each_usable(usable("hyper_spread"))
@pytest.mark.parametrize("streams", STREAMS)
def test_the_output_of_a_half_layer_is_added_to_every_stream(
    kernel: Kernel, device: str, dtype: str, streams: str
) -> None:
    facts, size = STREAMS[streams]
    n = facts.num_streams
    x = randn(40, n * size, device=device, dtype=dtype)
    y = randn(40, size, device=device, dtype=dtype, seed=1)
    y[3] *= 1000
    num_factors = sum(facts.sizes) - n
    factors = randn(40, num_factors, device=device, dtype="F32", seed=2)
    after = kernel.fn(y, x, factors)
    kept = x.double().view(40, n, size)
    if facts.sinkhorn_iterations:
        kept = factors[:, n:].double().view(40, n, n).transpose(1, 2) @ kept
    expected = factors[:, :n, None].double() * y.double().unsqueeze(1) + kept
    assert_close(after, expected.flatten(1), depth=n, dtype=dtype, factors=2)
    for some in (slice(1), slice(7), slice(5, 39)):
        assert same_bits(kernel.fn(y[some], x[some], factors[some]), after[some])


@each_usable([case for case in usable("soft_cap") if case[3] == "F32"])
def test_capped_logits_keep_within_the_cap(kernel: Kernel, device: str, dtype: str) -> None:
    x = randn(5, 1013, device=device, dtype=dtype) * 40
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), 1e30])
    expected = 30 * torch.tanh(x.double() / 30)
    capped = kernel.fn(x, 30.0)
    assert capped is x
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=8 * 30 * 2.0**-24)


FORMATS = tuple(CODED_FORMATS)
WINDOWS = (None, 5, 1000)


@dataclass(frozen=True)
class Attention:
    """What attention is asked for; `kv_format` is the dtype's own where the cache is not quantized."""

    device: str
    dtype: str
    kv_format: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None

    def problem(self, op: Any) -> Problem:
        return problem(
            op,
            self.device,
            self.dtype,
            n=self.head_dim,
            k=self.num_heads // self.num_kv_heads,
            scheme=self.kv_format,
        )

    @property
    def factors(self) -> int:
        """Roundings in a term: of the query times its scale, the weight, the key and the value."""
        return 4 if self.dtype == "BF16" else 0


def scattered(asked: Attention, lengths: list[int]) -> tuple[PagedKV, Tensor]:
    """Empty pages, and tables of blocks in no order."""
    num_blocks = [-(-length // asked.block_size) for length in lengths]
    order = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(4)) + 1).tolist()
    table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int64)
    for row, count in enumerate(num_blocks):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = (asked.num_kv_heads, 1 + sum(num_blocks), asked.block_size, asked.head_dim)
    kv = empty_pages(asked.kv_format, shape, asked.device, static_scales=(0.02, 0.02))
    return kv, table.to(asked.device)


def filled(kv: PagedKV, table: Tensor, lengths: list[int], *, dtype: str) -> PagedKV:
    """Random keys and values at every position of the contexts."""
    for row, length in enumerate(lengths):
        positions = torch.arange(length, device=table.device)
        slots = table[row, positions // kv.block_size] * kv.block_size + positions % kv.block_size
        k, v = (
            randn(
                length,
                kv.k.shape[0],
                kv.head_dim,
                device=str(table.device),
                dtype=dtype,
                seed=10 * row + seed,
            )
            for seed in (1, 2)
        )
        kv.write_(slots, k, v)
    return kv


@each_usable(usable("rope_store", n=16, k=3))
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store_turns_pairs_of_dimensions_and_writes_keys_and_values(
    kernel: Kernel, device: str, dtype: str, normed: bool
) -> None:
    qkv = randn(5, (6 + 2 + 2) * 16, device=device, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 1, 2], device=device)
    angles = torch.rand(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device) * 6
    cos, sin = (torch.cat((f, f), -1).to(DTYPES[dtype]) for f in (angles.cos(), angles.sin()))
    weight = randn(8, 16, device=device, dtype=dtype, seed=2) if normed else None
    kv, table = scattered(Attention(device, dtype, dtype, 6, 2, 16, 16, None), [8, 20])
    slots = table[0, 0] * 16 + positions
    q = kernel.fn(qkv, cos, sin, positions, slots, kv, num_heads=6, qk_norm=weight, eps=1e-6)

    heads = qkv.view(5, 10, 16).double()
    qk = heads[:, :8]
    if weight is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    turn = torch.complex(cos[positions, None, :8].double(), sin[positions, None, :8].double())
    turned = torch.complex(qk[..., :8], qk[..., 8:]) * turn
    expected = torch.cat((turned.real, turned.imag), -1)
    k, v = kv.gather(table[0], 8, DTYPES[dtype])
    assert_close(q, expected[:, :6], depth=2, dtype=dtype, factors=3)
    assert_close(k[:, positions].transpose(0, 1), expected[:, 6:], depth=2, dtype=dtype, factors=3)
    assert torch.equal(v[:, positions].transpose(0, 1), qkv.view(5, 10, 16)[:, 8:])
    for row in range(5):
        alone = kernel.fn(
            qkv[row : row + 1],
            cos,
            sin,
            positions[row : row + 1],
            slots[row : row + 1],
            kv,
            num_heads=6,
            qk_norm=weight,
            eps=1e-6,
        )
        assert same_bits(alone, q[row : row + 1])


@each_usable(usable("rope_store", n=16, k=3))
@pytest.mark.parametrize("norms", ["heads", "whole", "rotated"])
@pytest.mark.parametrize("centered", [False, True])
def test_rope_store_norms_all_heads_at_once_or_after_they_are_turned_and_grows_queries(
    kernel: Kernel, device: str, dtype: str, norms: str, centered: bool
) -> None:
    whole = norms == "whole"
    turns = norms == "rotated"
    qkv = randn(5, (6 + 2 + 2) * 16, device=device, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 1, 2], device=device)
    ones, zeros = (torch.full((8, 16), value, dtype=DTYPES[dtype], device=device) for value in (1.0, 0.0))
    weight = 1 + randn(8, 16, device=device, dtype="F32", seed=2)
    growth = (1 + torch.arange(8, device=device) / 4).to(DTYPES[dtype])
    facts: dict[str, Any] = {"num_heads": 6, "qk_norm": weight, "eps": 1e-6, "growth_P": growth}
    facts |= {"whole": whole, "rotates_first": turns, "centered": centered}
    tables = (zeros, ones) if turns else (ones, zeros)
    kv, table = scattered(Attention(device, dtype, dtype, 6, 2, 16, 16, None), [8])
    slots = table[0, 0] * 16 + positions
    q = kernel.fn(qkv, *tables, positions, slots, kv, **facts)
    heads = qkv.view(5, 10, 16)
    heads = torch.cat((-heads[..., 8:], heads[..., :8]), dim=-1) if turns else heads
    parts = [heads[:, :6], heads[:, 6:8]]
    weights = list(weight.split([6, 2]))
    if whole:
        pairs = zip(parts, weights, strict=True)
        normed = [
            normed_f64(part.flatten(1), each.flatten(), 1e-6, centered=centered).view(part.shape)
            for part, each in pairs
        ]
    else:
        normed = [
            normed_f64(part, each, 1e-6, centered=centered) for part, each in zip(parts, weights, strict=True)
        ]
    expected_q = normed[0] * growth[positions].double().view(-1, 1, 1)
    k, _ = kv.gather(table[0], 8, DTYPES[dtype])
    assert_close(q, expected_q, depth=2, dtype=dtype, factors=3)
    assert_close(k[:, positions].transpose(0, 1), normed[1], depth=2, dtype=dtype, factors=3)
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.fn(qkv[one], *tables, positions[one], slots[one], kv, **facts)
        assert same_bits(alone, q[one])


@each_usable(usable("rope_store", n=16, k=3))
@pytest.mark.parametrize("rotates_first", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("with_keys", [False, True])
def test_rope_store_adds_a_bias_to_the_norms_of_heads(
    kernel: Kernel, device: str, dtype: str, rotates_first: bool, centered: bool, with_keys: bool
) -> None:
    """By a quarter of a turn, so that a bias that is added on the wrong side of it is found."""
    num_normed = 8 if with_keys else 6
    qkv = randn(5, (10 if with_keys else 6) * 16, device=device, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 1, 2], device=device)
    ones, zeros = (torch.full((8, 16), value, dtype=DTYPES[dtype], device=device) for value in (1.0, 0.0))
    weight = 1 + randn(num_normed, 16, device=device, dtype="F32", seed=2)
    bias = randn(num_normed, 16, device=device, dtype="F32", seed=3)
    facts: dict[str, Any] = {"num_heads": 6, "qk_norm": weight, "qk_bias": bias, "eps": 1e-6}
    facts |= {"rotates_first": rotates_first, "centered": centered}
    kv, table = scattered(Attention(device, dtype, dtype, 6, 2, 16, 16, None), [8])
    slots = table[0, 0] * 16 + positions
    q = kernel.fn(qkv, zeros, ones, positions, slots, kv, **facts)

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)

    heads = qkv.view(5, -1, 16)[:, :num_normed]
    heads = turned(heads) if rotates_first else heads
    normed = normed_f64(heads, weight, 1e-6, centered=centered) + bias.double()
    normed = normed if rotates_first else turned(normed)
    assert_close(q, normed[:, :6], depth=2, dtype=dtype, factors=3)
    if with_keys:
        k, _ = kv.gather(table[0], 8, DTYPES[dtype])
        assert_close(k[:, positions].transpose(0, 1), normed[:, 6:], depth=2, dtype=dtype, factors=3)
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.fn(qkv[one], zeros, ones, positions[one], slots[one], kv, **facts)
        assert same_bits(alone, q[one])


@each_usable(usable("rope_store", n=16, k=3))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("own_values", [False, True])
def test_rope_store_norms_values_and_takes_keys_for_them(
    kernel: Kernel, device: str, dtype: str, normed: bool, own_values: bool
) -> None:
    qkv = randn(5, (6 + 2 + 2 * own_values) * 16, device=device, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 1, 2], device=device)
    ones, zeros = (torch.full((8, 16), value, dtype=DTYPES[dtype], device=device) for value in (1.0, 0.0))
    weight = 1 + randn(8, 16, device=device, dtype=dtype, seed=2)
    facts: dict[str, Any] = {"num_heads": 6, "qk_norm": weight, "eps": 1e-6, "v_norm": normed}
    kv, table = scattered(Attention(device, dtype, dtype, 6, 2, 16, 16, None), [8])
    slots = table[0, 0] * 16 + positions
    q = kernel.fn(qkv, ones, zeros, positions, slots, kv, **facts)
    heads = qkv.view(5, -1, 16)
    k, v = (each[:, positions].transpose(0, 1) for each in kv.gather(table[0], 8, DTYPES[dtype]))
    assert_close(q, normed_f64(heads[:, :6], weight[:6], 1e-6), depth=2, dtype=dtype, factors=3)
    assert_close(k, normed_f64(heads[:, 6:8], weight[6:], 1e-6), depth=2, dtype=dtype, factors=3)
    values = heads[:, -2:]
    if normed:
        assert_close(
            v, normed_f64(values, torch.ones_like(weight[6:]), 1e-6), depth=2, dtype=dtype, factors=2
        )
    else:
        assert torch.equal(v, values)
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.fn(qkv[one], ones, zeros, positions[one], slots[one], kv, **facts)
        assert same_bits(alone, q[one])
    again = [each[:, positions].transpose(0, 1) for each in kv.gather(table[0], 8, DTYPES[dtype])]
    assert same_bits(again[0], k)
    assert same_bits(again[1], v)


@each_usable(usable("rope_store", n=16, k=3))
@pytest.mark.parametrize("norms", ["none", "heads", "whole", "rotated"])
def test_rope_store_of_a_layer_without_keys_writes_nothing(
    kernel: Kernel, device: str, dtype: str, norms: str
) -> None:
    qkv = randn(5, (6 + 2 + 2) * 16, device=device, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 1, 2], device=device)
    cos, sin = (randn(8, 16, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = 1 + randn(8, 16, device=device, dtype="F32", seed=3) if norms != "none" else None
    growth = (1 + torch.arange(8, device=device) / 4).to(DTYPES[dtype])
    facts: dict[str, Any] = {"num_heads": 6, "eps": 1e-6, "growth_P": growth, "v_norm": True}
    facts |= {"whole": norms == "whole", "rotates_first": norms == "rotated"}
    kv, table = scattered(Attention(device, dtype, dtype, 6, 2, 16, 16, None), [8])
    before = [each.clone() for each in kv.tensors]
    slots = table[0, 0] * 16 + positions
    rows = cos, sin, positions, slots, kv
    own = {"qk_norm": None if weight is None else weight[:6], **facts}
    q = kernel.fn(qkv[:, : 6 * 16], *rows, **own)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(kv.tensors, before, strict=True))
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.fn(qkv[one, : 6 * 16], cos, sin, positions[one], slots[one], kv, **own)
        assert same_bits(alone, q[one])
    assert same_bits(kernel.fn(qkv, *rows, qk_norm=weight, **facts), q)


@pytest.mark.parametrize("op", ["rms_norm", "act_mul", "quantize_rows"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "how", ["dynamic", "static", "int8", "groups", "int8 static", "int8 asymmetric", "int8 static asymmetric"]
)
def test_quantized_rows_are_the_rows_rounded_to_their_own_scale(op: Any, device: str, how: str) -> None:
    fn = select(problem(op, device, "BF16", n=384)).fn
    quant = ActivationQuant(
        torch.tensor(0.03, device=device) if "static" in how else None,
        INT8 if "int8" in how else FP8,
        group_size=128 if how == "groups" else None,
        symmetric="asymmetric" not in how,
        static_zero=torch.tensor(-40, dtype=torch.int32, device=device) if "static asymm" in how else None,
    )
    x = randn(7, 768, device=device, dtype="BF16")
    x[2] = 0
    weight = randn(768, device=device, dtype="BF16", seed=1)
    arguments = {"rms_norm": (x, weight, 1e-5), "act_mul": (x, "silu"), "quantize_rows": (x,)}[op]
    plain = x if op == "quantize_rows" else fn(*arguments)
    rows = fn(*arguments, quant)
    expected = quantize(plain, quant)
    assert torch.equal(rows.scale_T, expected.scale_T)
    assert same_bits(rows.values_TK, expected.values_TK)
    assert expected.zero_T is None or torch.equal(rows.zero_T, expected.zero_T)
    alone = fn(*(each[3:4] if each is x else each for each in arguments), quant)
    assert same_bits(alone.values_TK, rows.values_TK[3:4])


@each_usable(usable("act_mul", n=37))
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_act_mul(kernel: Kernel, device: str, dtype: str, name: str, factor: float) -> None:
    x = randn(9, 2 * 37, device=device, dtype=dtype)
    gate = factor * x.double()[:, :37]
    up = x.double()[:, 37:]
    normal = 0.5 * (1 + torch.erf(gate / 2**0.5))
    tanh = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    share = {"silu": 1 / (1 + (-gate).exp()), "gelu": normal, "gelu_pytorch_tanh": tanh}[name]
    assert_close(kernel.fn(x, name, gate_factor=factor), gate * share * up, depth=4, dtype=dtype)
    if factor == 1 and name != "silu":
        assert_close(kernel.fn(x[:, :37], name, gated=False), gate * share, depth=4, dtype=dtype)


@each_usable(usable("act_mul", n=37))
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_clamped_gates(kernel: Kernel, device: str, dtype: str, factor: float) -> None:
    x = 6 * randn(9, 2 * 37, device=device, dtype=dtype)
    gate = (factor * x.double()[:, :37]).clamp(max=7.0)
    up = x.double()[:, 37:].clamp(-7.0, 7.0)
    assert int((gate == 7).sum()) > 0
    expected = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    assert_close(kernel.fn(x, "swiglu_clamped", gate_factor=factor), expected, depth=4, dtype=dtype)
    plain, beside = (x[:, :37], x[:, 37:])
    assert same_bits(kernel.fn(plain, "swiglu_clamped", up_TF=beside), kernel.fn(x, "swiglu_clamped"))


@each_usable(usable("act_mul", n=37))
def test_act_mul_with_a_cap(kernel: Kernel, device: str, dtype: str) -> None:
    x = 4 * randn(9, 2 * 37, device=device, dtype=dtype)
    gate, up = x.double().chunk(2, dim=1)
    capped = torch.nn.functional.silu(gate).clamp(max=2) * up.clamp(-2, 2)
    assert (up.abs() > 2).any()
    assert (gate > 3).any()
    assert_close(kernel.fn(x, "silu", cap=2.0), capped, depth=4, dtype=dtype)


@each_usable(usable("act_mul", n=37))
@pytest.mark.parametrize("numbers", [(0.8, 0.8, 0.5, -1e-6), (0.01, 3.0, 0.5, -1e-3)])
def test_xielu(kernel: Kernel, device: str, dtype: str, numbers: tuple[float, ...]) -> None:
    """A result is within some roundings of its two terms, which have opposite signs where x is negative."""
    numbers_4 = torch.tensor(numbers, dtype=torch.float32, device=device)
    a_p, a_n, beta, eps = numbers_4.double()
    small = torch.logspace(-6, 1, 37, device=device).neg().unsqueeze(0)
    ordinary = 3 * randn(9, 80, device=device, dtype=dtype)[:, 43:]
    for x in (ordinary, small.to(ordinary.dtype)):
        wide = x.double()
        curved = a_n * (torch.expm1(torch.minimum(wide, eps)) - wide)
        curved = torch.where(wide > 0, a_p * wide * wide, curved)
        expected = curved + beta * wide
        y = kernel.fn(x, "xielu", xielu_4=numbers_4)
        float32 = torch.finfo(torch.float32)
        terms = curved.abs() + (a_n + beta) * wide.abs()
        limit = 8 * float32.eps * terms + torch.finfo(DTYPES[dtype]).eps * expected.abs()
        assert ((y.double() - expected).abs() <= limit + torch.finfo(DTYPES[dtype]).tiny).all()
        assert same_bits(kernel.fn(x[:1], "xielu", xielu_4=numbers_4), y[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["dynamic", "int8", "int8 asymmetric", "groups"])
def test_rows_of_xielu_are_quantized_as_they_are(device: str, how: str) -> None:
    """What a program holds beyond a row is no part of it: xielu(0) is -253 here, and the rows are not."""
    fn = select(problem("act_mul", device, "BF16", n=384)).fn
    group_size = 128 if how == "groups" else None
    dtype = INT8 if "int8" in how else FP8
    quant = ActivationQuant(None, dtype, group_size=group_size, symmetric="asymmetric" not in how)
    numbers_4 = torch.tensor([0.8, 400.0, 0.5, -1.0], device=device)
    x = 5 + randn(7, 384, device=device, dtype="BF16").abs()
    plain = fn(x, "xielu", xielu_4=numbers_4)
    rows = fn(x, "xielu", quant, xielu_4=numbers_4)
    expected = quantize(plain, quant)
    assert torch.equal(rows.scale_T, expected.scale_T)
    assert same_bits(rows.values_TK, expected.values_TK)


@each_usable(usable("act_mul", n=37))
def test_a_gate_may_lie_beside_other_columns_than_what_it_gates(
    kernel: Kernel, device: str, dtype: str
) -> None:
    gate = randn(9, 80, device=device, dtype=dtype)[:, 43:]
    up = randn(9, 37, device=device, dtype=dtype, seed=1)
    y = kernel.fn(gate, "sigmoid", up_TF=up)
    assert_close(y, up.double() / (1 + (-gate.double()).exp()), depth=4, dtype=dtype)
    assert same_bits(kernel.fn(gate[3:4], "sigmoid", up_TF=up[3:4]), y[3:4])
    assert same_bits(kernel.fn(torch.cat((gate, up), dim=1), "silu"), kernel.fn(gate, "silu", up_TF=up))


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@each_usable(usable("act_mul", n=37))
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "xielu", "swiglu_clamped"])
def test_act_mul_of_a_row_is_the_same_among_few_and_many_rows(
    kernel: Kernel, device: str, dtype: str, name: str
) -> None:
    x = randn(900, 2 * 83, device=device, dtype=dtype)
    numbers_4 = torch.tensor([0.8, 0.9, 0.5, -1e-6], device=device)
    numbers = {"xielu_4": numbers_4} if name == "xielu" else {}
    y = kernel.fn(x, name, **numbers)
    for start, end in ((0, 1), (899, 900), (3, 43), (100, 700)):
        assert same_bits(kernel.fn(x[start:end], name, **numbers), y[start:end])


@pytest.mark.usefixtures("_threads")
@each_usable(usable("rms_norm"))
def test_rms_norm_of_a_row_is_the_same_among_few_and_many_rows(
    kernel: Kernel, device: str, dtype: str
) -> None:
    x = randn(900, 83, device=device, dtype=dtype)
    weight = randn(83, device=device, dtype=dtype, seed=1)
    y = kernel.fn(x, weight, 1e-5)
    for start, end in ((0, 1), (899, 900), (3, 43), (100, 700)):
        assert same_bits(kernel.fn(x[start:end], weight, 1e-5), y[start:end])


def dense_attention(
    q_THC: Tensor,
    k_KLC: Tensor,
    v_KLC: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """float64; the queries are the last T positions."""
    repeat = q_THC.shape[1] // k_KLC.shape[0]
    k, v = (x.double().repeat_interleave(repeat, dim=0) for x in (k_KLC, v_KLC))
    scores = torch.einsum("thc,hlc->htl", q_THC.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ends = torch.arange(k.shape[1] - q_THC.shape[0], k.shape[1], device=k.device).unsqueeze(1)
    keys = torch.arange(k.shape[1], device=k.device)
    seen = (keys <= ends) & (keys > ends - (window or k.shape[1] + 1))
    return torch.einsum("htl,hlc->thc", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def attentions() -> Iterator[Attention]:
    """On the CPU all there is, but for codes, which are widened before anything else is done, only what their
    widening depends on.
    """
    for heads in ((6, 2, 24), (4, 4, 64), (9, 3, 64), (32, 8, 128)):
        yield from (
            Attention("cpu", t, t, *heads, block_size, window)
            for t in DTYPES
            for block_size in (16, 128)
            for window in WINDOWS
        )
    for heads, kv_format, window in product(((6, 2, 24), (4, 4, 64), (9, 3, 64)), FORMATS, (None, 150)):
        yield from (
            Attention("cpu", dtype, kv_format, *heads, block_size, window)
            for dtype, block_size in (("F32", 16), ("BF16", 128))
        )
    if "cuda" in DEVICES:
        yield Attention("cuda", "BF16", "BF16", 9, 3, 64, 16, None)
        yield Attention("cuda", "F32", "F32", 6, 2, 24, 128, 5)
        yield from (Attention("cuda", "BF16", each, 32, 8, 128, 128, 150) for each in TOKEN_HEAD_FORMATS)


def attention_cases(op: Any) -> Any:
    cases = {
        "-".join((kernel.name, *map(str, vars(asked).values()))): (kernel, asked)
        for asked in attentions()
        for kernel in candidates(op)
        if kernel.refusal(asked.problem(op)) is None
    }
    # On a CPU the shape of an 8B model takes seconds a case, and smaller heads have the same code.
    rows = [
        slow(*case) if case[1].device == "cpu" and case[1].head_dim > 24 and case[1].num_heads != 4 else case
        for case in cases.values()
    ]
    return pytest.mark.parametrize(("kernel", "asked"), rows, ids=cases)


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize("window", [None, 40])
def test_scores_may_be_capped(op: Any, device: str, head_dim: int, window: int | None) -> None:
    asked = Attention(device, "F32", "F32", 6, 2, head_dim, 16, window)
    lengths = [3, 131]
    kv, table = scattered(asked, lengths)
    filled(kv, table, lengths, dtype="F32")
    q = randn(6, 6, head_dim, device=device, dtype="F32") * 3
    facts: dict[str, Any] = {"window": window, "scale": 0.3, "softcap": 2.0}
    for kernel in candidates(op):
        if kernel.refusal(replace(asked.problem(op), softcap=True)) is not None:
            continue
        if op == "attention_decode":
            out = kernel.fn(q, kv, table, torch.tensor(lengths, device=device), q_len=3, **facts)
        else:
            out = kernel.fn(q, kv, table, (3, 3), tuple(lengths), **facts)
        for row, length in enumerate(lengths):
            k, v = kv.gather(table[row], length, torch.float32)
            rows = slice(3 * row, 3 * row + 3)
            assert_close(
                out[rows],
                dense_attention(q[rows], k, v, window, 0.3, 2.0),
                depth=length,
                dtype="F32",
                factors=8,
            )


@attention_cases("attention_prefill")
def test_prefill_attention_of_ragged_chunks(kernel: Kernel, asked: Attention) -> None:
    query_lens = (1, 37, 5, 1)
    lengths = [1, 37, 200, 131]
    kv, table = scattered(asked, lengths)
    filled(kv, table, lengths, dtype=asked.dtype)
    q = randn(sum(query_lens), asked.num_heads, asked.head_dim, device=asked.device, dtype=asked.dtype)
    out = kernel.fn(q, kv, table, query_lens, tuple(lengths), window=asked.window, scale=0.3)
    for row, chunk in enumerate(torch.split(q, list(query_lens))):
        k, v = kv.gather(table[row], lengths[row], torch.float32)
        own = torch.split(out, list(query_lens))[row]
        expected = dense_attention(chunk, k, v, asked.window, 0.3)
        if kernel.name.endswith(".fp8"):  # queries and weights are rounded to e4m3, by 2^-4 at most
            assert float((own.float() - expected).norm() / expected.norm()) < 2**-4
        else:
            assert_close(own, expected, depth=lengths[row], dtype=asked.dtype, factors=asked.factors)
        alone = kernel.fn(
            chunk,
            kv,
            table[row : row + 1],
            (query_lens[row],),
            (lengths[row],),
            window=asked.window,
            scale=0.3,
        )
        assert same_bits(alone, own)


@attention_cases("attention_decode")
@pytest.mark.one_in(6)
def test_decode_attention_reads_its_own_blocks_and_its_rows_are_independent(
    kernel: Kernel, asked: Attention
) -> None:
    lengths = [8, 40, 127, 128, 129, 1500, 16, 17]
    kv, table = scattered(asked, lengths)
    filled(kv, table, lengths, dtype=asked.dtype)
    context_lens = torch.tensor(lengths, device=asked.device)
    facts: dict[str, Any] = {"window": asked.window, "scale": 0.3}
    q_all = randn(len(lengths), 8, asked.num_heads, asked.head_dim, device=asked.device, dtype=asked.dtype)
    alone: list[list[Tensor]] = [
        [] for _ in lengths
    ]  # [row][back]: a plain decode step of that position, alone
    for row, length in enumerate(lengths):
        narrow = table[row : row + 1, : -(-length // asked.block_size)]
        for back in range(8):
            own_q = q_all[row, -1 - back].unsqueeze(0).contiguous()
            own_length = context_lens[row : row + 1] - back
            alone[row].append(kernel.fn(own_q, kv, narrow, own_length, q_len=1, **facts))
    for q_len in (1, 3, 8):
        q = q_all[:, -q_len:].flatten(0, 1).contiguous()
        out = kernel.fn(q, kv, table, context_lens, q_len=q_len, **facts).unflatten(0, (-1, q_len))
        for row, length in enumerate(lengths):
            k, v = kv.gather(table[row], length, torch.float32)
            expected = dense_attention(q_all[row, -q_len:], k, v, asked.window, 0.3)
            assert_close(out[row], expected, depth=length, dtype=asked.dtype, factors=asked.factors)
            assert all(same_bits(alone[row][back], out[row, -1 - back].unsqueeze(0)) for back in range(q_len))
    rows = torch.tensor([5, 2, 7, 0, 4], device=asked.device)
    q = q_all[:, 0].contiguous()
    whole = kernel.fn(q_all[:, 0].contiguous(), kv, table, context_lens, q_len=1, **facts)
    assert same_bits(kernel.fn(q[rows], kv, table[rows], context_lens[rows], q_len=1, **facts), whole[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_everywhere(op: Any, device: str, dtype: str) -> None:
    facts = {"activation": "silu", "experts": 4, "top_k": 2} if op == "experts" else {}
    for m_max in (1, 8, 128, 129, 4096):
        kernel = select(problem(op, device, dtype, m_max=m_max, **facts))
        assert kernel.op == op
        assert (kernel.repack is not None) == (op in ("linear", "head_linear", "gated_mix"))
        assert (kernel.repack_experts is not None) == (op == "experts")


def test_names_are_unique_and_members_stand_under_their_own_name() -> None:
    assert all(kernel.name == name and kernel.op == op for op in OPS for name, kernel in KERNELS[op].items())


def test_the_highest_rank_that_refuses_nothing_is_taken_and_refusals_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_even(asked: Problem) -> str | None:
        return "N must be even" if asked.n % 2 else None

    members: PluginSet[Kernel] = PluginSet("test kernel", "compress.kernels.rms_norm")
    for name, min_sm, rank, supports in (
        ("plain", 0, 0, anything),
        ("even", 0, 2, only_even),
        ("hopper", 90, 3, anything),
    ):
        members.add(name, Kernel("rms_norm", name, min_sm, rank, supports, fn=torch.neg))
    monkeypatch.setitem(select_module.KERNELS, "rms_norm", members)
    even = problem("rms_norm", "cpu", "F32", n=4)
    odd = problem("rms_norm", "cpu", "F32", n=5)
    assert (select(even).name, select(odd).name) == ("even", "plain")
    assert refusals(odd) == {
        "hopper": "needs sm_90 or newer and this device is cpu",
        "even": "N must be even",
    }


def test_a_problem_nobody_supports_names_every_reason() -> None:
    with pytest.raises(
        EnvironmentUnfit,
        match=r"scheme W1A1, N = 64, K = 64, M = 1\.\.8 on tpu: .*reference\.dequantized\.tile4: ",
    ):
        select(Problem("linear", 64, 64, 1, 8, True, "W1A1", torch.bfloat16, "tpu", 0))
