"""The Triton attention kernels without a GPU: their arithmetic in triton's interpreter, their compilation for
the devices they serve.

The interpreter cannot multiply bfloat16: float16 and float32 stand in.
"""

import subprocess
import sys

import pytest
import torch

from tests.support.slow import slow
from tests.support.triton_interpreter import (
    INTERPRETED,
    use_row_independent_products,
)

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the child process")
@pytest.mark.parametrize("sm", [80, 90])
def test_the_kernels_compile_for_a_device_that_is_not_here(sm: int) -> None:
    command = [sys.executable, "-m", "tests.support.compile_kernels", str(sm)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-4000:]


if INTERPRETED:
    from dataclasses import replace

    from torch import Tensor

    from compress.kernels.attention_decode import paged as decode
    from compress.kernels.attention_prefill import paged as prefill
    from compress.kernels.operands.paged import CODED_FORMATS, DENSE_FORMATS, PagedKV, empty_pages
    from compress.kernels.operands.tiles import FixedLists

    FORMATS = ["dense", *CODED_FORMATS]

    def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def pages(kv_format: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> PagedKV:
        num_kv_heads, num_blocks, block_size, head_dim = shape
        name = DENSE_FORMATS[dtype] if kv_format == "dense" else kv_format
        kv = empty_pages(name, shape, static_scales=(0.02, 0.02))
        num_slots = num_blocks * block_size
        k, v = (randn(num_slots, num_kv_heads, head_dim, seed=seed).to(dtype) for seed in (0, 1))
        kv.write_(torch.arange(num_slots), k, v)
        return kv

    def block_table(num_requests: int, num_blocks: int) -> Tensor:
        blocks = torch.randperm(num_requests * num_blocks, generator=torch.Generator().manual_seed(2)) + 1
        return blocks.view(num_requests, num_blocks).to(torch.int32)

    def poisoned(kv: PagedKV, table_RB: Tensor, context_lens: list[int]) -> PagedKV:
        """Dense pages with NaN wherever no context reaches: padding block, and behind each last position."""
        k, v = (each.clone() for each in (kv.k, kv.v))
        for each in (k, v):
            each[:, 0] = torch.nan
            for blocks, length in zip(table_RB.tolist(), context_lens, strict=True):
                for block_idx, block in enumerate(blocks):
                    each[:, block, max(0, length - block_idx * kv.block_size) :] = torch.nan
        return PagedKV(k, v)

    def expected_f64(
        q_TC: Tensor,
        kv: PagedKV,
        blocks_B: Tensor,
        context_len: int,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """[Q, H, C]: the last Q positions of one context, by the definition."""
        k, v = kv.gather(blocks_B, context_len, torch.float64)
        q = q_TC.double().unflatten(1, (k.shape[0], -1))
        s = torch.einsum("qkgc,klc->kgql", q, k) * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        at = torch.arange(context_len - len(q), context_len).unsqueeze(1)
        keys = torch.arange(context_len)
        unseen = (keys > at) | (keys <= at - window if window else torch.tensor(False))
        s = s.masked_fill(unseen, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.double().view(*s.shape[:2], 1, 1).expand(*s.shape[:3], 1)
            s = torch.cat((s, sinks), dim=-1)
        p = s.softmax(-1)[..., :context_len]
        return torch.einsum("kgql,klc->qkgc", p, v).flatten(1, 2)

    def assert_close(actual: Tensor, expected: Tensor) -> None:
        """One rounding of weights and result to the dtype; a long logit's float32 rounding is some steps of
        its weight.
        """
        tolerance = torch.finfo(actual.dtype).eps + 32 * torch.finfo(torch.float32).eps
        assert float((actual.double() - expected).norm() / expected.norm()) < tolerance

    CASES = [
        *((each, 64, 64, 2, 50, torch.float16) for each in FORMATS),
        *((each, 96, 128, 1, 200, torch.float16) for each in FORMATS),
        ("dense", 100, 64, 2, None, torch.float16),  # rows that Hopper's copies do not take: 200 bytes
        slow("FP8_STATIC", 64, 16, 4, None, torch.float32),
        slow("FP8_TOKEN_HEAD", 80, 64, 4, None, torch.float32),
        slow("dense", 128, 32, 7, None, torch.float16),
        slow("INT8_TOKEN_HEAD", 80, 16, 4, None, torch.float32),
        slow("INT4_TOKEN_HEAD", 80, 16, 3, 70, torch.float32),
    ]
    each_case = pytest.mark.parametrize(
        ("kv_format", "head_dim", "block_size", "group", "window", "dtype"), CASES
    )

    @each_case
    def test_decode_is_attention_over_the_pages(
        kv_format: str, head_dim: int, block_size: int, group: int, window: int | None, dtype: torch.dtype
    ) -> None:
        context_lens = [4, 130, 333]
        q_len = 3
        scale = head_dim**-0.5
        table = block_table(3, -(-400 // block_size))
        kv = pages(kv_format, (2, 1 + table.numel(), block_size, head_dim), dtype)
        q = randn(9, 2 * group, head_dim, dtype=dtype, seed=3)
        seen = poisoned(kv, table, context_lens) if kv_format == "dense" else kv
        out = decode.attention_decode(
            q, seen, table, torch.tensor(context_lens), q_len=q_len, window=window, scale=scale
        )
        for idx, context_len in enumerate(context_lens):
            rows = slice(idx * q_len, (idx + 1) * q_len)
            assert_close(out[rows], expected_f64(q[rows], kv, table[idx], context_len, window, scale))

    @pytest.mark.parametrize("window", [slow(None), 100])
    def test_a_decode_row_keeps_its_bits_in_any_company(
        monkeypatch: pytest.MonkeyPatch, window: int | None
    ) -> None:
        use_row_independent_products(monkeypatch)
        context_lens = torch.tensor([300, 8, 135])
        q_len = 4
        table = block_table(3, 20)
        kv = pages("dense", (2, 61, 16, 64), torch.float32)
        q = randn(3, q_len, 8, 64, seed=3)
        whole = decode.attention_decode(
            q.flatten(0, 1), kv, table, context_lens, q_len=q_len, window=window, scale=0.125
        ).view(q.shape)
        for query in range(q_len):
            lens = context_lens - (q_len - 1 - query)
            one = decode.attention_decode(
                q[:, query].contiguous(), kv, table, lens, q_len=1, window=window, scale=0.125
            )
            assert torch.equal(one, whole[:, query])
        for config in (replace(decode.CONFIG, programs=1), replace(decode.CONFIG, programs=10**6)):
            again = decode.attention_decode(
                q.flatten(0, 1),
                kv,
                table,
                context_lens,
                q_len=q_len,
                window=window,
                scale=0.125,
                config=config,
            )
            assert torch.equal(again.view(q.shape), whole)
        alone = decode.attention_decode(
            q[2], kv, table[2:, :9].contiguous(), context_lens[2:], q_len=q_len, window=window, scale=0.125
        )
        assert torch.equal(alone, whole[2])

    RARE_CASES = [
        *((each, 64, 64, 2, 50, torch.float16, 3.0) for each in FORMATS),
        ("dense", 512, 64, 2, None, torch.float16, None),
        ("dense", 256, 16, 2, None, torch.float16, 1.5),
        slow("dense", 80, 32, 5, 40, torch.float32, 2.0),
    ]

    @pytest.mark.parametrize(
        ("kv_format", "head_dim", "block_size", "group", "window", "dtype", "softcap"), RARE_CASES
    )
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_scores_may_be_capped_and_have_sinks_and_heads_be_wide(
        kv_format: str,
        head_dim: int,
        block_size: int,
        group: int,
        window: int | None,
        dtype: torch.dtype,
        softcap: float | None,
        has_sinks: bool,
    ) -> None:
        lens = [4, 133]
        scale = 0.11
        table = block_table(2, -(-200 // block_size))
        kv = pages(kv_format, (1, 1 + table.numel(), block_size, head_dim), dtype)
        seen = poisoned(kv, table, lens) if kv_format == "dense" else kv
        q = randn(6, group, head_dim, dtype=dtype, seed=3)
        sinks_H = 2 * randn(group, seed=5) if has_sinks else None
        facts = {"window": window, "scale": scale, "softcap": softcap, "sinks_H": sinks_H}
        decoded = decode.attention_decode(q, seen, table, torch.tensor(lens), q_len=3, **facts)
        filled = prefill.attention_prefill(q, seen, table, (3, 3), tuple(lens), **facts)
        for out in (decoded, filled):
            for idx, length in enumerate(lens):
                rows = slice(3 * idx, 3 * idx + 3)
                expected = expected_f64(q[rows], kv, table[idx], length, window, scale, softcap, sinks_H)
                assert_close(out[rows], expected)

    def test_a_padding_row_gives_zeros_where_it_has_no_position() -> None:
        kv = pages("dense", (1, 2, 16, 64), torch.float32)
        table = torch.zeros(1, 4, dtype=torch.int32)
        out = decode.attention_decode(
            randn(4, 2, 64), kv, table, torch.tensor([1]), q_len=4, window=None, scale=1.0
        )
        assert torch.equal(out[:3], torch.zeros(3, 2, 64))
        torch.testing.assert_close(out[3], kv.v[:, 0, 0].expand(2, -1))

    @each_case
    def test_prefill_is_attention_over_the_pages(
        kv_format: str, head_dim: int, block_size: int, group: int, window: int | None, dtype: torch.dtype
    ) -> None:
        query_lens = (1, 70, 77)
        context_lens = (1, 70, 333)
        scale = head_dim**-0.5
        table = block_table(3, -(-400 // block_size))
        kv = pages(kv_format, (2, 1 + table.numel(), block_size, head_dim), dtype)
        q = randn(sum(query_lens), 2 * group, head_dim, dtype=dtype, seed=3)
        seen = poisoned(kv, table, list(context_lens)) if kv_format == "dense" else kv
        out = prefill.attention_prefill(q, seen, table, query_lens, context_lens, window=window, scale=scale)
        for idx, (part, rows) in enumerate(
            zip(out.split(list(query_lens)), q.split(list(query_lens)), strict=True)
        ):
            assert_close(part, expected_f64(rows, kv, table[idx], context_lens[idx], window, scale))

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_lists_in_place_serve_other_chunks(kv_format: str) -> None:
        table = block_table(3, 8)
        kv = pages(kv_format, (2, 25, 16, 64), torch.float32)
        lists = FixedLists(40, 4, 32, torch.device("cpu"))
        facts = {"window": None, "scale": 0.125}
        for lens in (((10, 30), (100, 30)), ((40,), (128,)), ((1, 20, 19), (20, 50, 80))):
            q = randn(40, 4, 64, seed=len(lens[0]))
            lists.load(*lens)
            expected = prefill.attention_prefill(q, kv, table, *lens, **facts)
            ours = prefill.attention_prefill(q, kv, table, *lens, **facts, lists=lists)
            assert torch.equal(ours, expected)

    def test_a_prefilled_sequence_keeps_its_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
        use_row_independent_products(monkeypatch)
        table = block_table(2, 10)
        kv = pages("dense", (2, 21, 16, 64), torch.float32)
        q = randn(120, 4, 64, seed=3)
        both = prefill.attention_prefill(q, kv, table, (50, 70), (150, 70), window=None, scale=0.125)
        one = prefill.attention_prefill(
            q[50:].contiguous(), kv, table[1:], (70,), (70,), window=None, scale=0.125
        )
        assert torch.equal(both[50:], one)
