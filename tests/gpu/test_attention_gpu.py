"""The Triton attention kernels on a GPU: the reference's values within rounding, and the bits of decode rows
in any company.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import hopper, hopper_plan
from compress.kernels.attention_decode import paged as decode
from compress.kernels.attention_decode.chunks import attention_decode as reference_decode
from compress.kernels.attention_prefill import fp8, fp8_reference
from compress.kernels.attention_prefill import paged as prefill
from compress.kernels.attention_prefill.sdpa import attention_prefill as reference_prefill
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.paged import (
    CODED_FORMATS,
    DENSE_FORMATS,
    INT_FORMATS,
    TOKEN_HEAD_FORMATS,
    PagedKV,
    dequantized,
    empty_pages,
)
from compress.kernels.operands.tiles import FixedLists
from compress.kernels.problem import Problem, compute_capability
from compress.kernels.rope_store import fused, reference

pytestmark = pytest.mark.gpu

FORMATS = ["dense", *CODED_FORMATS]
# head dimension, block size, heads, kv heads, window, dtype
SHAPES = [
    (128, 64, 32, 8, None, torch.bfloat16),
    (64, 16, 14, 2, None, torch.bfloat16),
    (80, 64, 4, 4, None, torch.float16),
    (96, 32, 16, 2, 300, torch.bfloat16),
    (256, 64, 8, 4, 100, torch.bfloat16),
    (64, 64, 8, 4, None, torch.float32),
]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="its clusters and launches are Hopper's",
)
each_format = pytest.mark.parametrize("kv_format", FORMATS)
each_shape = pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "num_kv_heads", "window", "dtype"), SHAPES
)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device="cuda", dtype=dtype)


def make_pages(kv_format: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> PagedKV:
    (num_kv_heads, num_blocks, block_size, head_dim) = shape
    name = DENSE_FORMATS[dtype] if kv_format == "dense" else kv_format
    kv = empty_pages(name, shape, "cuda", static_scales=(0.02, 0.02))
    num_slots = num_blocks * block_size
    k, v = (randn(num_slots, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (0, 1))
    kv.write_(torch.arange(num_slots, device="cuda"), k, v)
    return kv


def make_table(num_requests: int, num_blocks: int) -> Tensor:
    blocks = torch.randperm(num_requests * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
    return blocks.view(num_requests, num_blocks).to(device="cuda", dtype=torch.int32)


def poison_behind_(kv: PagedKV, table_RB: Tensor, context_lens: list[int]) -> None:
    """Write NaN, as numbers or scales, to the padding block and behind the last position of each context."""
    scaled = kv.format in TOKEN_HEAD_FORMATS
    for each in (kv.k_scale, kv.v_scale) if scaled else (kv.k, kv.v):
        assert each is not None
        each[:, 0] = torch.nan
        for blocks, length in zip(table_RB.tolist(), context_lens, strict=True):
            for block_idx, block in enumerate(blocks):
                each[:, block, max(0, length - block_idx * kv.block_size) :] = torch.nan


def poisoned_memory(size_bytes: int = 1 << 26) -> None:
    """Leave NaN in the memory that the next results are allocated from."""
    torch.full((size_bytes // 4,), torch.nan, device="cuda")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < torch.finfo(actual.dtype).eps + 64 * torch.finfo(torch.float32).eps


@each_format
@each_shape
def test_decode_rows_are_right_and_keep_their_bits(
    kv_format: str,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    context_lens = [9, 2900, 130, 777, 256]
    q_len = 8
    scale = head_dim**-0.5
    table = make_table(5, 4096 // block_size)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    kv = make_pages(kv_format, (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(5, q_len, num_heads, head_dim, dtype=dtype, seed=3)
    rows = q.flatten(0, 1)
    expected = reference_decode(rows, kv, table.long(), lens.long(), q_len=q_len, window=window, scale=scale)
    if kv_format != "FP8_STATIC":
        poison_behind_(kv, table, context_lens)
    whole = decode.attention_decode(rows, kv, table, lens, q_len=q_len, window=window, scale=scale)
    assert_close(whole, expected)
    whole = whole.view(q.shape)
    for shorter in (1, 2, 5):
        for first in range(0, q_len - shorter + 1, 3):
            part = slice(first, first + shorter)
            queries = q[:, part].flatten(0, 1).contiguous()
            ends = lens - (q_len - first - shorter)
            out = decode.attention_decode(queries, kv, table, ends, q_len=shorter, window=window, scale=scale)
            assert torch.equal(out.view(5, shorter, num_heads, head_dim), whole[:, part])
    for programs in (1, 7, 10**6):
        config = replace(decode.CONFIG, programs=programs)
        out = decode.attention_decode(
            rows, kv, table, lens, q_len=q_len, window=window, scale=scale, config=config
        )
        assert torch.equal(out.view(q.shape), whole)
    for request in (0, 1, 4):
        alone = table[request : request + 1, : -(-context_lens[request] // block_size)].contiguous()
        out = decode.attention_decode(
            q[request], kv, alone, lens[request : request + 1], q_len=q_len, window=window, scale=scale
        )
        assert torch.equal(out, whole[request])


@needs_hopper
@each_format
@each_shape
def test_rows_of_lanes_are_right_and_keep_their_bits(
    kv_format: str,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    name = DENSE_FORMATS[dtype] if kv_format == "dense" else kv_format
    sm = compute_capability(torch.device("cuda"))
    group = num_heads // num_kv_heads
    reason = hopper.supports(
        Problem("attention_decode", head_dim, group, 1, 128, True, name, dtype, "cuda", sm)
    )
    if reason is not None:
        pytest.skip(reason)
    context_lens = [9, 2900, 130, 777, 256]
    q_len = 8
    sinks = None if window is None else 3 * randn(num_heads, seed=4)
    facts = {"window": window, "scale": head_dim**-0.5, "sinks_H": sinks}
    table = make_table(5, 4096 // block_size)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    kv = make_pages(kv_format, (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(5, q_len, num_heads, head_dim, dtype=dtype, seed=3)
    rows = q.flatten(0, 1)
    expected = reference_decode(rows, kv, table.long(), lens.long(), q_len=q_len, **facts)
    if kv_format != "FP8_STATIC":
        poison_behind_(kv, table, context_lens)
    poisoned_memory()
    whole = hopper.attention_decode(rows, kv, table, lens, q_len=q_len, **facts)
    assert_close(whole, expected)
    whole = whole.view(q.shape)
    for shorter in (1, 2, 5):
        for first in range(0, q_len - shorter + 1, 3):
            part = slice(first, first + shorter)
            queries = q[:, part].flatten(0, 1).contiguous()
            ends = lens - (q_len - first - shorter)
            out = hopper.attention_decode(queries, kv, table, ends, q_len=shorter, **facts)
            assert torch.equal(out.view(5, shorter, num_heads, head_dim), whole[:, part])
    eights = hopper_plan.row_eights_of(num_heads // num_kv_heads)
    slicing = hopper_plan.slicing_of(kv.format, head_dim)
    of_warps = ((slicing.depth, 4), (1, 4), (3, 4), (2, 8), (slicing.depth, 2))
    constants = (*((*each, False) for each in of_warps), (2, 4, True), (3, 2, True), (1, 8, True))
    divided: list[Tensor] = []
    for (depth, warps, specialized), engine in product(constants, (False, True)):
        dealt = replace(slicing, depth=depth, warps=warps, engine=engine, specialized=specialized)
        clusters = hopper_plan.clusters_of(dealt)
        for cluster in clusters:
            facts_of_page = dtype, kv.format, head_dim, block_size
            variant = hopper.Variant(*facts_of_page, eights, cluster, True, True, dealt)
            if engine and not variant.tiled:
                continue  # the same kernel as without the engine
            if variant.shared_bytes(8 * eights) > gpu_of(kv.k.device).shared_bytes - 4096:
                continue  # no block of it fits a multiprocessor
            by_slicing = {"row_eights": eights, "cluster": cluster, "slicing": dealt, "q_len": 1}
            call = partial(
                hopper.attend, q[:, 7].contiguous(), kv, table.long(), lens.long(), **by_slicing, **facts
            )
            assert torch.equal(call(), whole[:, 7])
            if cluster == clusters[-1]:
                divided.append(call(section_keys=512))
    assert_close(divided[0], expected.view(q.shape)[:, 7])
    assert all(torch.equal(each, divided[0]) for each in divided)
    assert torch.equal(divided[0][0], whole[0, 7]), "a context of one section"
    for request in (0, 1, 4):
        alone = table[request : request + 1, : -(-context_lens[request] // block_size)].contiguous()
        assert torch.equal(
            hopper.attention_decode(q[request], kv, alone, lens[request : request + 1], q_len=q_len, **facts),
            whole[request],
        )


@needs_hopper
@pytest.mark.parametrize("kv_format", ["dense", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_keys_of_the_step_itself_are_read_after_they_were_written(kv_format: str, block_size: int) -> None:
    """Pages are fetched ahead of the launch before: a chain of steps in one graph must see every position
    that it writes.
    """
    num_steps = 40
    table = make_table(3, 256 // block_size)
    kv = make_pages(kv_format, (2, 1 + table.numel(), block_size, 128), torch.bfloat16)
    cos = randn(256, 128, dtype=torch.bfloat16, seed=7)
    qkv = randn(num_steps, 3, 12 * 128, dtype=torch.bfloat16, seed=8)
    firsts = torch.tensor([20, 60, 130], device="cuda")
    positions = [firsts + step for step in range(num_steps)]
    blocks = [table.long().gather(1, (at // block_size).unsqueeze(1)).squeeze(1) for at in positions]
    slots = [block * block_size + at % block_size for block, at in zip(blocks, positions, strict=True)]

    lens = [at + 1 for at in positions]

    def run(step: int, pages: PagedKV) -> Tensor:
        q = fused.rope_store(
            qkv[step], cos, cos, positions[step], slots[step], pages, num_heads=8, qk_norm=None, eps=1e-5
        )
        return hopper.attention_decode(q, pages, table, lens[step], q_len=1, window=None, scale=0.1)

    expected = []
    tensors = {name: each.clone() for name, each in vars(kv).items() if isinstance(each, Tensor)}
    pages = replace(kv, **tensors)
    for step in range(num_steps):
        expected.append(run(step, pages))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(step, kv) for step in range(num_steps)]
    graph.replay()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, expected, strict=True))


@each_format
@each_shape
def test_prefill_is_the_reference_within_rounding(
    kv_format: str,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    query_lens = (1, 700, 129, 64, 300)
    context_lens = (5, 700, 1000, 2000, 301)
    scale = head_dim**-0.5
    table = make_table(5, 2048 // block_size)
    kv = make_pages(kv_format, (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(sum(query_lens), num_heads, head_dim, dtype=dtype, seed=3)
    wide = kv if kv.k_scale is not None else PagedKV(kv.k.float(), kv.v.float())
    expected = reference_prefill(
        q.float(), wide, table.long(), query_lens, context_lens, window=window, scale=scale
    )
    if kv_format != "FP8_STATIC":
        poison_behind_(kv, table, list(context_lens))
    out = prefill.attention_prefill(q, kv, table, query_lens, context_lens, window=window, scale=scale)
    assert_close(out, expected)
    alone = prefill.attention_prefill(
        q[1:701].contiguous(), kv, table[1:2], (700,), (700,), window=window, scale=scale
    )
    assert torch.equal(alone, out[1:701])


@needs_hopper
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "num_kv_heads", "window", "dtype"),
    [
        (128, 64, 8, 2, None, torch.bfloat16),
        (128, 16, 14, 2, 200, torch.float16),
        (64, 32, 8, 8, None, torch.float16),
        (64, 128, 64, 1, 70, torch.bfloat16),
    ],
)
def test_prefill_with_products_in_fp8(
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """The reference has the same roundings. Sums of products in FP8 and powers of two are less exact, so that
    a weight near the middle between two numbers of e4m3 may become the other."""
    query_lens, context_lens = (1, 700, 129, 33, 300), (5, 700, 1000, 2000, 301)
    table = make_table(5, 2048 // block_size)
    kv = make_pages("FP8_ATTENTION", (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(sum(query_lens), num_heads, head_dim, dtype=dtype, seed=3)
    facts: dict[str, Any] = {"window": window, "scale": head_dim**-0.5}
    expected = fp8_reference.attention_prefill(q, kv, table.long(), query_lens, context_lens, **facts)
    poison_behind_(kv, table, list(context_lens))
    poisoned_memory()
    out = fp8.attention_prefill(q, kv, table, query_lens, context_lens, **facts)
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 2**-7
    lists = FixedLists(q.shape[0] + 9, 7, 256, q.device)
    lists.load(query_lens, context_lens)
    assert torch.equal(
        fp8.attention_prefill(q, kv, table, query_lens, context_lens, lists=lists, **facts), out
    )
    for row, (queries, own) in enumerate(zip(q.split(query_lens), out.split(query_lens), strict=True)):
        lens = query_lens[row : row + 1], context_lens[row : row + 1]
        alone = fp8.attention_prefill(queries.contiguous(), kv, table[row : row + 1], *lens, **facts)
        assert torch.equal(alone, own)


def test_a_captured_decode_serves_other_contexts() -> None:
    kv = make_pages("dense", (2, 33, 64, 128), torch.bfloat16)
    table = make_table(2, 16)
    q = randn(2, 8, 128, dtype=torch.bfloat16, seed=3)
    lens = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    decode.attention_decode(q, kv, table, lens, q_len=1, window=None, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode.attention_decode(q, kv, table, lens, q_len=1, window=None, scale=0.1)
    for context_lens in ([1000, 3], [64, 129]):
        lens.copy_(torch.tensor(context_lens))
        graph.replay()
        assert torch.equal(
            captured, decode.attention_decode(q, kv, table, lens, q_len=1, window=None, scale=0.1)
        )


@each_format
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 77])
def test_rope_store_is_the_reference_within_a_rounding(kv_format: str, normed: bool, num_rows: int) -> None:
    num_heads = 8
    num_kv_heads = 2
    head_dim = 128
    qkv, cos, sin = (
        randn(n, m, dtype=torch.bfloat16, seed=n)
        for n, m in ((num_rows, 12 * head_dim), (99, head_dim), (98, head_dim))
    )
    positions = torch.arange(num_rows, device="cuda")
    slots = torch.randperm(256, device="cuda")[:num_rows] + 64
    weight = randn(10, head_dim, dtype=torch.bfloat16, seed=5) if normed else None
    expected, actual = (
        make_pages(kv_format, (num_kv_heads, 5, 64, head_dim), torch.bfloat16) for _ in range(2)
    )
    q = reference.rope_store(
        qkv, cos, sin, positions, slots, expected, num_heads=num_heads, qk_norm=weight, eps=1e-5
    )
    got = fused.rope_store(
        qkv, cos, sin, positions, slots, actual, num_heads=num_heads, qk_norm=weight, eps=1e-5
    )
    torch.testing.assert_close(got, q, rtol=2**-7, atol=0)
    for ours, scale, theirs, their_scale in (
        (actual.k, actual.k_scale, expected.k, expected.k_scale),
        (actual.v, actual.v_scale, expected.v, expected.v_scale),
    ):
        rounding = 2**-7 if kv_format == "dense" or ours.dtype in INT_FORMATS else 2**-3
        step = 1.01 * float(their_scale.max()) if ours.dtype in INT_FORMATS and their_scale is not None else 0
        torch.testing.assert_close(
            dequantized(ours, scale, torch.float32),
            dequantized(theirs, their_scale, torch.float32),
            rtol=rounding,
            atol=step,
        )
    if not normed:
        assert torch.equal(actual.k.view(torch.uint8), expected.k.view(torch.uint8))
    if not normed:
        assert torch.equal(got, q)
