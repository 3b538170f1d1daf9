"""Hopper's decode attention gives the reference's values within rounding, and a row's bits do not depend on
its company: on a CPU, by `cuda_emulator.py`, with one block for each request and KV head."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.attention_decode import hopper, hopper_plan
from compress.kernels.attention_decode.chunks import attention_decode as reference_decode
from compress.kernels.operands.paged import TOKEN_HEAD_FORMATS, PagedKV, empty_pages
from compress.kernels.operands.rows import FP8
from tests.support.cuda_emulator import needs_compiler
from tests.support.emulated_kernels import use_emulated
from tests.support.random_experts import randn
from tests.support.slow import slow

LENS = (5, 150, 33, 16)
Q_LEN = 3
CASES = [
    ("BF16", 128, 64, 8, 2, None, torch.bfloat16),
    slow("F16", 64, 16, 7, 1, None, torch.float16),
    ("FP8_TOKEN_HEAD", 64, 16, 4, 2, 40, torch.bfloat16),
    slow("FP8_STATIC", 80, 64, 2, 2, None, torch.float16),
    slow("BF16", 96, 32, 8, 1, 20, torch.bfloat16),
    ("INT8_TOKEN_HEAD", 48, 16, 4, 1, None, torch.bfloat16),
    ("INT4_TOKEN_HEAD", 64, 64, 6, 2, 40, torch.bfloat16),
    slow("INT4_TOKEN_HEAD", 128, 64, 4, 1, None, torch.bfloat16),
    slow("FP8_STATIC", 256, 32, 2, 1, None, torch.bfloat16),
    slow("INT8_TOKEN_HEAD", 128, 64, 3, 1, 40, torch.float16),
    slow("INT4_TOKEN_HEAD", 96, 16, 8, 2, None, torch.float16),
]


def pages(kv_format: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> PagedKV:
    num_kv_heads, num_blocks, block_size, head_dim = shape
    empty = empty_pages(kv_format, shape, static_scales=(0.02, 0.02))
    k, v = (randn(num_blocks * block_size, num_kv_heads, head_dim, seed=seed).to(dtype) for seed in (0, 1))
    empty.write_(torch.arange(num_blocks * block_size), k, v)
    return empty


def poison_behind_(kv: PagedKV, table: Tensor) -> None:
    """Write NaN, as numbers or as scales, behind the last position of each context."""
    for each in (kv.k_scale, kv.v_scale) if kv.format in TOKEN_HEAD_FORMATS else (kv.k, kv.v):
        if each is None or each.dtype == FP8:
            continue
        each[:, 0] = torch.nan
        for blocks, length in zip(table.tolist(), LENS, strict=True):
            for idx, block in enumerate(blocks):
                each[:, block, max(0, length - idx * kv.block_size) :] = torch.nan


@pytest.fixture(autouse=True)
def _emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_emulated(monkeypatch, tmp_path_factory.getbasetemp())
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@needs_compiler
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "block_size", "num_heads", "num_kv_heads", "window", "dtype"), CASES
)
@pytest.mark.one_in(4)
def test_values_and_bits(
    kv_format: str,
    head_dim: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    blocks = 160 // block_size + 1
    order = torch.randperm(len(LENS) * blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(LENS), blocks).to(torch.int32)
    lens = torch.tensor(LENS, dtype=torch.int32)
    kv = pages(kv_format, (num_kv_heads, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(len(LENS), Q_LEN, num_heads, head_dim, seed=3).to(dtype)
    facts = {"window": window, "scale": head_dim**-0.5}
    slicing = hopper_plan.slicing_of(kv_format, head_dim)

    def attend(queries: Tensor, ends: Tensor, tables: Tensor, *, engine: bool = False) -> Tensor:
        q_len = queries.shape[1]
        eights = hopper_plan.row_eights_of(q_len * num_heads // num_kv_heads)
        rows = queries.flatten(0, 1).contiguous()
        dealt = {"row_eights": eights, "cluster": 1, "slicing": replace(slicing, engine=engine)}
        out = hopper.attend(rows, kv, tables, ends, q_len=q_len, **dealt, **facts)
        return out.view(queries.shape)

    expected = reference_decode(q.flatten(0, 1), kv, table.long(), lens.long(), q_len=Q_LEN, **facts)
    poison_behind_(kv, table)
    whole = attend(q, lens, table, engine=True)
    error = (whole.flatten(0, 1).double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < torch.finfo(dtype).eps
    assert torch.equal(attend(q[:, 1:2], lens - 1, table), whole[:, 1:2])
    assert torch.equal(attend(q[2:], lens[2:], table[2:].contiguous()), whole[2:])


@needs_compiler
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "block_size"),
    [("INT4_TOKEN_HEAD", 128, 64), slow("INT4_TOKEN_HEAD", 64, 16), slow("BF16", 64, 64)],
)
@pytest.mark.one_in(4)
def test_how_slices_come_and_warps_of_a_block_change_no_bit(
    kv_format: str, head_dim: int, block_size: int
) -> None:
    """Each warp has several slices after those on their way, the last of them with new positions."""
    kv = pages(kv_format, (1, 1150 // block_size, block_size, head_dim), torch.bfloat16)
    order = torch.randperm(1150 // block_size, generator=torch.Generator().manual_seed(2))
    table = order.view(1, -1).to(torch.int32)
    lens = torch.tensor([1050], dtype=torch.int32)
    q = randn(2, 4, head_dim, seed=3).to(torch.bfloat16)
    slicing = hopper_plan.slicing_of(kv_format, head_dim)
    facts = {"q_len": 2, "window": None, "scale": 0.1}
    expected = reference_decode(q, kv, table.long(), lens.long(), **facts)
    facts |= {"row_eights": 1, "cluster": 1}
    first, *others = (
        hopper.attend(q, kv, table, lens, slicing=replace(slicing, **constants), **facts)
        for constants in (
            {"depth": 1, "engine": True},
            {"depth": 2},
            {"depth": 2, "specialized": True},
            {"depth": 3, "engine": True, "specialized": True},
            {"depth": 3, "warps": 8, "engine": True},
        )
    )
    error = (first.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < torch.finfo(torch.bfloat16).eps
    assert all(torch.equal(each, first) for each in others)


@needs_compiler
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "block_size", "window", "dtype"),
    [
        ("BF16", 64, 64, None, torch.bfloat16),
        slow("FP8_STATIC", 80, 64, 150, torch.float16),
        slow("INT4_TOKEN_HEAD", 64, 16, 150, torch.bfloat16),
    ],
)
def test_contexts_of_several_sections(
    kv_format: str, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    """Sections have two slices each. A context of one has the bits that it has undivided."""
    lens = torch.tensor([5, 400, 130, 64, 65], dtype=torch.int32)
    blocks = 448 // block_size
    order = torch.randperm(len(lens) * blocks, generator=torch.Generator().manual_seed(2)) + 1
    table = order.view(len(lens), blocks).to(torch.int32)
    kv = pages(kv_format, (2, 1 + table.numel(), block_size, head_dim), dtype)
    q = randn(len(lens), Q_LEN, 4, head_dim, seed=3).to(dtype)
    facts = {"window": window, "scale": head_dim**-0.5, "sinks_H": randn(4, seed=9).float()}
    slicing = hopper_plan.slicing_of(kv_format, head_dim)

    def attend(
        queries: Tensor, ends: Tensor, tables: Tensor, section_keys: int | None = 64, **constants: Any
    ) -> Tensor:
        dealt = {"row_eights": 1, "cluster": 1, "slicing": replace(slicing, **constants)}
        facts_of_call = {"q_len": queries.shape[1], "section_keys": section_keys, **dealt, **facts}
        rows = queries.flatten(0, 1).contiguous()
        return hopper.attend(rows, kv, tables, ends, **facts_of_call).view(queries.shape)

    whole = attend(q, lens, table)
    expected = reference_decode(q.flatten(0, 1), kv, table.long(), lens.long(), q_len=Q_LEN, **facts).view(
        q.shape
    )
    error = (whole.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < torch.finfo(dtype).eps
    undivided = attend(q, lens, table, section_keys=None)
    for idx, length in enumerate(lens.tolist()):
        alone = attend(q[idx : idx + 1], lens[idx : idx + 1], table[idx : idx + 1].contiguous())
        assert torch.equal(alone[0], whole[idx])
        assert length > 64 or torch.equal(undivided[idx], whole[idx])
    assert torch.equal(attend(q[:, 1:2], lens - 1, table), whole[:, 1:2])
    assert torch.equal(attend(q, lens, table, warps=8), whole)
    assert torch.equal(attend(q, lens, table, depth=2, specialized=True), whole)


@needs_compiler
@pytest.mark.parametrize("kv_format", ["BF16", "FP8_TOKEN_HEAD"])
def test_a_sink_is_a_score_without_a_value(kv_format: str) -> None:
    kv = pages(kv_format, (2, 14, 16, 64), torch.bfloat16)
    table = torch.arange(1, 13, dtype=torch.int32).view(1, -1).repeat(3, 1)
    lens = torch.tensor([170, 33, 0], dtype=torch.int32)
    q = randn(3, 6, 64, seed=3).to(torch.bfloat16)
    sinks = torch.tensor([-200.0, -1.0, 0.0, 2.0, 8.0, 200.0])
    facts = {"q_len": 1, "window": 100, "scale": 0.125, "sinks_H": sinks}
    dealt = {"row_eights": 1, "cluster": 1, "slicing": hopper_plan.slicing_of(kv_format, 64)}
    out = hopper.attend(q, kv, table, lens, **dealt, **facts)
    expected = reference_decode(q[:2], kv, table[:2].long(), lens[:2].long(), **facts)
    error = (out[:2].double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < torch.finfo(torch.bfloat16).eps
    assert not out[2].any(), "a row without a position"
    assert not out[:, 5].any(), "a sink that takes all weight"
