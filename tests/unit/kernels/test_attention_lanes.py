"""Hopper's decode attention as far as a CPU shows it: how work is dealt out, refusals, and compilation."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from compress.kernels.attention_decode.hopper import (
    CLUSTERS,
    TWO_BLOCKS_BYTES,
    Variant,
    cluster_of,
    clusters_of,
    row_eights_of,
)
from compress.kernels.compilers import nvrtc
from compress.kernels.problem import Problem
from compress.kernels.select import refusals, select

HOPPER = Problem("attention_decode", 128, 4, 1, 128, True, "BF16", torch.bfloat16, "cuda", 90)
VARIANT = Variant(torch.bfloat16, "BF16", 128, 64, 1, 4, long_table=True, long_lens=True)


@pytest.mark.parametrize(
    "variant",
    [
        VARIANT,
        replace(VARIANT, cluster=1, long_lens=False),
        replace(VARIANT, cluster=4, kv_format="FP8_TOKEN_HEAD", block_size=16, row_eights=2),
        replace(VARIANT, kv_format="FP8_STATIC", dtype=torch.float16, head_dim=80, long_table=False),
        replace(VARIANT, head_dim=256, row_eights=2, cluster=8),
        replace(VARIANT, head_dim=256, row_eights=1, cluster=4),
    ],
    ids=repr,
)
@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
def test_the_kernel_compiles(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.compile_cubin(variant.source, 90)[:4] == b"\x7fELF"


@pytest.mark.parametrize("kv_format", ["BF16", "FP8_TOKEN_HEAD"])
def test_every_shape_fits_into_shared_memory(kv_format: str) -> None:
    for head_dim in range(16, 257, 16):
        for num_rows in (1, 8, 9, 32, 64):
            eights = row_eights_of(num_rows)
            cluster = cluster_of(1024, eights, head_dim, coded=kv_format != "BF16")
            assert (
                replace(
                    VARIANT, kv_format=kv_format, head_dim=head_dim, row_eights=eights, cluster=cluster
                ).shared_bytes(8 * eights)
                < 220 * 1024
            )


def test_a_slice_is_the_same_however_the_work_is_dealt_out() -> None:
    assert (
        len(
            {
                replace(VARIANT, cluster=cluster, row_eights=eights).keys
                for cluster in clusters_of(VARIANT.head_dim)
                for eights in (1, 2)
            }
        )
        == 1
    )


def test_few_pairs_share_more_blocks_and_many_rows_keep_their_sums_apart() -> None:
    wide = partial(cluster_of, coded=False)
    assert [wide(8 * rows, 1, 128) for rows in (1, 7, 8, 16, 32, 128)] == [4, 4, 2, 2, 1, 1]
    assert all(2 * CLUSTERS[wide(pairs, 1, 128)] >= pairs for pairs in (1, 60, 61, 132, 133, 264))
    assert [wide(10**4, eights, 128) for eights in (1, 2)] == [1, 2]
    assert [wide(8 * rows, 1, 256) for rows in (1, 3, 4, 128)] == [8, 8, 4, 4]
    assert [wide(10**4, eights, 256) for eights in (1, 2)] == [4, 8]
    coded = partial(cluster_of, coded=True)
    assert [coded(8 * rows, 1, 128) for rows in (1, 11, 12, 24, 25)] == [4, 4, 2, 2, 1]
    assert [coded(8 * rows, 2, 128) for rows in (1, 7, 8, 128)] == [4, 4, 2, 2]


@pytest.mark.parametrize("kv_format", ["BF16", "FP8_TOKEN_HEAD"])
def test_sums_of_a_block_of_its_own_fit_where_its_tiles_were(kv_format: str) -> None:
    for head_dim in range(16, 257, 16):
        for eights in (1, 2):
            each = replace(VARIANT, kv_format=kv_format, head_dim=head_dim, row_eights=eights, cluster=1)
            assert each.sent_bytes(8 * eights) <= each.tile_bytes // 4
            assert each.shared_bytes(8 * eights) == each.tile_bytes


def test_three_blocks_of_their_own_fit_a_multiprocessor() -> None:
    reserved, static, total = 1024, 512, 233472  # the driver's bytes of each block, ours, and all there are
    assert 2 * (TWO_BLOCKS_BYTES + static + reserved) <= total < 3 * (TWO_BLOCKS_BYTES + reserved)
    for kv_format, cluster in (("BF16", 1), ("FP8_TOKEN_HEAD", 1), ("FP8_TOKEN_HEAD", 4)):
        each = replace(VARIANT, kv_format=kv_format, cluster=cluster)
        assert 3 * (each.shared_bytes(8) + static + reserved) <= total


def test_it_serves_hopper_in_sixteen_bits_and_says_why_not_elsewhere() -> None:
    assert select(HOPPER).name == "cuda.lanes"
    for changed, reason in (
        ({"sm": 80}, "sm_90"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"n": 72}, "multiple of 16"),
        ({"n": 512}, "256"),
    ):
        assert reason in refusals(replace(HOPPER, **changed))["cuda.lanes"]
