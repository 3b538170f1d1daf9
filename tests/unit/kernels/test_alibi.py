"""Attention with linear biases (ALiBi) by kernels: the numbers of the equation in float64 within
rounding, and rows of a decode step whose bits depend on their request alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import chunks, hopper
from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_prefill import fp8_reference, sdpa
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.coverage import coverage
from compress.kernels.operands.paged import PagedKV, empty_pages
from compress.kernels.problem import KernelDevice
from compress.kernels.select import select
from compress.models.alibi import Alibi
from compress.models.family import family_of
from tests.support.triton_interpreter import INTERPRETED, use_row_independent_products
from tests.support.usable_kernels import DEVICES

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 6, 2, 32
LENGTHS = (1, 40, 133)
SCALE = 0.2
MPT = {"model_type": "mpt", "vocab_size": 512, "d_model": 512, "n_heads": 8, "n_layers": 2}
DEVICE = DEVICES[-1]
each_window = pytest.mark.parametrize("window", [None, 30])
needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or triton's interpreter"
)


@pytest.fixture(autouse=True)
def row_independent_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        use_row_independent_products(monkeypatch)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def slopes() -> Tensor:
    return Alibi().slopes(HEADS, SCALE).to(DEVICE)


def cached() -> tuple[PagedKV, Tensor]:
    """Return pages of sequences of `LENGTHS`, and their blocks."""
    num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    order = torch.randperm(len(LENGTHS) * num_blocks, generator=torch.Generator().manual_seed(1)) + 1
    shape = (KV_HEADS, 1 + len(order), BLOCK_SIZE, HEAD_DIM)
    table = order.view(len(LENGTHS), -1).to(DEVICE, torch.int32)
    return PagedKV(randn(*shape, seed=2), randn(*shape, seed=3)), table


def by_equation(
    q_THC: Tensor, kv: PagedKV, table: Tensor, query_lens: tuple[int, ...], window: int | None
) -> Tensor:
    """Return attention of the last queries of each sequence, float64, one query after the other."""
    rows, start = [], 0
    for request, (num_queries, length) in enumerate(zip(query_lens, LENGTHS, strict=True)):
        k, v = (each.double() for each in kv.gather(table[request], length, torch.float32))
        for idx in range(num_queries):
            position = length - num_queries + idx
            first = 0 if window is None else max(0, position + 1 - window)
            keys = torch.arange(first, position + 1, device=DEVICE)
            q_KGC = q_THC[start + idx].double().view(KV_HEADS, -1, HEAD_DIM)
            scores_KGP = SCALE * q_KGC @ k[:, keys].mT
            scores_KGP -= slopes().double().view(KV_HEADS, -1, 1) * (position - keys)
            rows.append((scores_KGP.softmax(-1) @ v[:, keys]).flatten(0, 1))
        start += num_queries
    return torch.stack(rows)


DECODES = [chunks, pytest.param(decode, marks=needs_triton)]
PREFILLS = [sdpa, pytest.param(prefill, marks=needs_triton)]


@each_window
@pytest.mark.parametrize("kernel", DECODES)
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_is_the_equation_and_a_request_is_alone(kernel: Any, q_len: int, window: int | None) -> None:
    kv, table = cached()
    query_lens = tuple(min(q_len, each) for each in LENGTHS)
    lengths = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32)
    q = randn(q_len * len(LENGTHS), HEADS, HEAD_DIM, seed=7)
    real = torch.tensor([idx >= q_len - num for num in query_lens for idx in range(q_len)], device=DEVICE)
    facts: dict[str, Any] = {"q_len": q_len, "window": window, "scale": SCALE, "slopes_H": slopes()}
    found = kernel.attention_decode(q, kv, table, lengths, **facts)
    expected = by_equation(q[real], kv, table, query_lens, window)
    torch.testing.assert_close(found[real].double(), expected, rtol=1e-4, atol=1e-5)
    for idx in range(len(LENGTHS)):
        rows = slice(idx * q_len, (idx + 1) * q_len)
        request = slice(idx, idx + 1)
        own = kernel.attention_decode(q[rows].contiguous(), kv, table[request], lengths[request], **facts)
        assert torch.equal(own[real[rows]], found[rows][real[rows]])


@each_window
@pytest.mark.parametrize("kernel", PREFILLS)
def test_prefill_is_the_equation(kernel: Any, window: int | None) -> None:
    kv, table = cached()
    query_lens = (1, 17, 133)
    q = randn(sum(query_lens), HEADS, HEAD_DIM, seed=7)
    facts: dict[str, Any] = {"window": window, "scale": SCALE, "slopes_H": slopes()}
    found = kernel.attention_prefill(q, kv, table, query_lens, LENGTHS, **facts)
    expected = by_equation(q, kv, table, query_lens, window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_kernels_without_the_term_are_not_selected() -> None:
    """A Hopper GPU has faster attention, in decoding and in prefill from FP8 pages, which refuses it."""
    device = KernelDevice("cuda", 90, torch.bfloat16)
    plain, falling = (device.problem("attention_decode", n=64, k=1, alibi=each) for each in (False, True))
    assert hopper.supports(plain) is None
    assert "distance" in str(hopper.supports(falling))
    falling = device.problem("attention_prefill", n=128, k=1, scheme=fp8_reference.FP8_ATTENTION, alibi=True)
    assert "distance" in str(fp8_reference.supports(falling))
    capped = device.problem("attention_decode", n=64, k=1, alibi=True, softcap=True)
    assert "no cap" in str(decode.supports(capped))
    capped = device.problem("attention_prefill", n=64, k=1, phase="prefill", alibi=True, softcap=True)
    assert "no cap" in str(prefill.supports(capped))
    assert select(device.problem("attention_decode", n=64, k=1, alibi=True)).name == "triton.paged"
    prefill_problem = device.problem("attention_prefill", n=64, k=1, phase="prefill", alibi=True)
    assert select(prefill_problem).name == "triton.paged"


@needs_triton
@pytest.mark.parametrize("kv_format", ["FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"])
def test_codes_of_the_cache_have_the_term_too(kv_format: str) -> None:
    dense, table = cached()
    kv = empty_pages(kv_format, tuple(dense.k.shape), device=DEVICE)
    slots = torch.arange(dense.k.shape[1] * BLOCK_SIZE, device=DEVICE)
    kv.write_(slots, *(each.flatten(1, 2).transpose(0, 1).contiguous() for each in (dense.k, dense.v)))
    lengths = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32)
    q = randn(len(LENGTHS), HEADS, HEAD_DIM, seed=7)
    facts: dict[str, Any] = {"q_len": 1, "window": None, "scale": SCALE, "slopes_H": slopes()}
    found = decode.attention_decode(q, kv, table, lengths, **facts)
    expected = chunks.attention_decode(q, kv, table, lengths, **facts)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_table_of_kernels_says_what_serves_a_model() -> None:
    arch = family_of(MPT).read_config(MPT)
    rows = coverage(arch, KernelDevice("cuda", 90, torch.bfloat16))
    attention = [row for row in rows if row.name.startswith("attention_")]
    assert {row.kernel for row in attention} == {"triton.paged"}
    assert all(row.as_json()["alibi"] for row in attention)
    refused = [row.refused["cuda.lanes"] for row in attention if "cuda.lanes" in row.refused]
    assert refused
    assert all("distance" in reason for reason in refused)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 14, 16, 112])
@pytest.mark.parametrize("as_powers", [False, True])
def test_slopes_are_those_of_the_paper(num_heads: int, as_powers: bool) -> None:
    def of_power(count: int) -> list[float]:
        return [2 ** (-8 * place / count) for place in range(1, count + 1)]

    whole = 2 ** math.floor(math.log2(num_heads))
    expected = of_power(whole) + of_power(2 * whole)[::2][: num_heads - whole]
    found = Alibi(as_powers=as_powers).slopes(num_heads, 0.5)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=0)
    scaled = Alibi(as_powers=as_powers, as_scores=True).slopes(num_heads, 0.5)
    assert torch.equal(scaled, found.bfloat16().float() * 0.5)
