"""Hopper's decode attention as far as a CPU shows it: how work is dealt out, refusals, and compilation."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.kernels.attention_decode.hopper import ONE_BLOCK_BYTES, TWO_BLOCKS_BYTES, Variant
from compress.kernels.attention_decode.hopper_plan import (
    CLUSTERS,
    Slicing,
    cluster_of,
    clusters_of,
    row_bytes_of,
    row_eights_of,
    slicing_of,
    spread_of,
)
from compress.kernels.compilers import nvrtc
from compress.kernels.problem import Problem
from compress.kernels.select import refusals, select

HOPPER = Problem("attention_decode", 128, 4, 1, 128, True, "BF16", torch.bfloat16, "cuda", 90)
SLICING = slicing_of("BF16", 128)
VARIANT = Variant(torch.bfloat16, "BF16", 128, 64, 1, 4, long_table=True, long_lens=True, slicing=SLICING)
STATIC_BYTES, RESERVED_BYTES, MULTIPROCESSOR_BYTES = 512, 1024, 233472
"""Shared memory: a block's own static variables, what the driver takes of each block, and all there is."""
ALL_FORMATS = ("BF16", "FP8_STATIC", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD")


def variant_of(kv_format: str, head_dim: int, **others: Any) -> Variant:
    slicing = slicing_of(kv_format, head_dim)
    return replace(VARIANT, kv_format=kv_format, head_dim=head_dim, slicing=slicing, **others)


def by_engine(kv_format: str, head_dim: int, **others: Any) -> Variant:
    of_slicing = {name: others.pop(name) for name in ("warps", "depth", "specialized") if name in others}
    variant = variant_of(kv_format, head_dim, **others)
    variant = replace(variant, slicing=replace(variant.slicing, engine=True, **of_slicing))
    assert variant.tiled
    return variant


def has_the_bits_of(slicing: Slicing, cut: Slicing) -> bool:
    return (slicing.keys, slicing.lanes) == (cut.keys, cut.lanes)


def head_dims(kv_format: str) -> range:
    return range(32, 257, 32) if kv_format == "INT4_TOKEN_HEAD" else range(16, 257, 16)


@pytest.mark.parametrize(
    "variant",
    [
        VARIANT,
        replace(VARIANT, cluster=1, long_lens=False),
        variant_of("FP8_TOKEN_HEAD", 128, block_size=16, row_eights=2),
        variant_of("FP8_STATIC", 80, dtype=torch.float16, long_table=False),
        variant_of("BF16", 256, row_eights=2, cluster=8),
        variant_of("BF16", 256, row_eights=1, cluster=4),
        variant_of("INT8_TOKEN_HEAD", 128, dtype=torch.float16, cluster=2),
        variant_of("INT4_TOKEN_HEAD", 128, block_size=16, row_eights=2),
        replace(
            VARIANT,
            kv_format="INT4_TOKEN_HEAD",
            cluster=2,
            slicing=replace(SLICING, keys=64, lanes=32, depth=3, warps=8),
        ),
        by_engine("BF16", 128, cluster=2, depth=2),
        by_engine("BF16", 256, row_eights=2, cluster=8),
        by_engine("FP8_STATIC", 256, cluster=2, warps=8, depth=1),
        by_engine("INT8_TOKEN_HEAD", 64, cluster=1, row_eights=2, dtype=torch.float16),
        by_engine("INT4_TOKEN_HEAD", 64, cluster=2, warps=8, depth=1),
        by_engine("BF16", 128, cluster=8, warps=2, depth=3, specialized=True),
        by_engine("FP8_TOKEN_HEAD", 128, cluster=4, depth=2, specialized=True, divided=True),
    ],
    ids=repr,
)
@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="no libnvrtc")
@pytest.mark.one_in(4)
def test_the_kernel_compiles(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.compile_cubin(variant.source, 90)[:4] == b"\x7fELF"


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_every_shape_fits_into_shared_memory(kv_format: str) -> None:
    pairs = (1, 15, 16, 30, 60, 61, 128, 132, 264, 265, 400, 1024)
    sizes = product(head_dims(kv_format), (1, 4, 5, 8, 9, 32, 64), (16, 64))
    for head_dim, num_rows, block_size in sizes:
        eights = row_eights_of(num_rows)
        spreads = {
            spread_of(each, num_rows, kv_format, head_dim, block_size=block_size, longest=longest)
            for each, longest in product(pairs, (1024, 4096))
        }
        for slicing, cluster in spreads:
            facts = {"row_eights": eights, "cluster": cluster, "block_size": block_size}
            each = replace(variant_of(kv_format, head_dim, **facts), slicing=slicing)
            assert cluster in clusters_of(slicing)
            assert each.shared_bytes(8 * eights) < 220 * 1024
            if cluster == 1:  # the sums of each warp lie where its own tiles were
                tiles = slicing.depth * 2 * slicing.keys * row_bytes_of(kv_format, head_dim)
                assert each.sent_bytes(8 * eights) <= tiles


def test_few_pairs_share_more_blocks_and_many_rows_keep_their_sums_apart() -> None:
    def wide(pairs: int, eights: int, head_dim: int) -> int:
        return cluster_of(pairs, eights, head_dim, slicing_of("BF16", head_dim), coded=False)

    assert [wide(8 * rows, 1, 128) for rows in (1, 7, 8, 16, 32, 128)] == [4, 4, 2, 2, 1, 1]
    assert all(2 * CLUSTERS[wide(pairs, 1, 128)] >= pairs for pairs in (1, 60, 61, 132, 133, 264))
    assert [wide(10**4, eights, 128) for eights in (1, 2)] == [1, 2]
    assert [wide(8 * rows, 1, 256) for rows in (1, 3, 4, 128)] == [8, 8, 4, 4]
    assert [wide(10**4, eights, 256) for eights in (1, 2)] == [4, 8]
    coded = partial(cluster_of, slicing=slicing_of("INT8_TOKEN_HEAD", 128), coded=True)
    assert [coded(8 * rows, 1, 128) for rows in (1, 7, 8, 24, 25)] == [4, 4, 2, 2, 1]
    assert [coded(8 * rows, 2, 128) for rows in (1, 7, 8, 128)] == [4, 4, 2, 2]


def test_codes_have_sixteen_warps_where_two_blocks_for_each_pair_fill_the_machine() -> None:
    def dealt(
        pairs: int, num_rows: int = 4, kv_format: str = "INT4_TOKEN_HEAD", block_size: int = 64
    ) -> tuple[int, int]:
        slicing, cluster = spread_of(pairs, num_rows, kv_format, 128, block_size=block_size, longest=4096)
        assert has_the_bits_of(slicing, slicing_of(kv_format, 128))
        assert slicing.engine == (block_size == 64)
        each = replace(variant_of(kv_format, 128, cluster=cluster), slicing=slicing)
        if slicing.warps == 8:
            assert 2 * (each.shared_bytes(num_rows) + 3072 + RESERVED_BYTES) <= MULTIPROCESSOR_BYTES
        return slicing.warps, cluster

    requests = (2, 7, 8, 16, 17, 24, 25, 33, 34, 256)
    assert [dealt(8 * each) for each in requests] == [(4, 4)] * 2 + [(8, 2)] * 6 + [(4, 2)] * 2
    assert [dealt(128, num_rows) for num_rows in (1, 5, 8, 9)] == [(8, 2)] * 3 + [(4, 2)]
    assert [dealt(128, num_rows, "INT8_TOKEN_HEAD") for num_rows in (1, 4, 5)] == [(8, 2)] * 2 + [(4, 2)]
    assert [dealt(8 * each, block_size=16) for each in requests] == (
        [(4, 4)] * 2 + [(8, 2)] * 2 + [(4, 2)] * 2 + [(4, 1)] * 4
    ), "no block of the cache holds a slice"


def test_codes_of_eight_bits_of_short_contexts_come_without_the_engine() -> None:
    def comes(longest: int, kv_format: str, pairs: int = 128) -> bool:
        return spread_of(pairs, 4, kv_format, 128, block_size=64, longest=longest)[0].engine

    assert [comes(longest, "FP8_TOKEN_HEAD") for longest in (1024, 1025)] == [False, True]
    assert comes(1024, "INT4_TOKEN_HEAD")
    assert comes(1024, "FP8_TOKEN_HEAD", pairs=265)
    assert [comes(1 << 20, kv_format, pairs=15) for kv_format in ("BF16", "FP8_TOKEN_HEAD")] == [True, False]
    assert not comes(1024, "BF16", pairs=15)
    assert comes(1024, "BF16", pairs=16)
    assert not spread_of(128, 4, "BF16", 96, block_size=64, longest=4096)[0].engine, "192 bytes"


@pytest.mark.parametrize("kv_format", ["BF16", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"])
def test_few_pairs_have_eight_blocks_with_a_lane_for_each_warp(kv_format: str) -> None:
    for pairs, longest in product((1, 8, 15), (1024, 1 << 20)):
        slicing, cluster = spread_of(pairs, 8, kv_format, 128, block_size=64, longest=longest)
        assert cluster * slicing.warps == slicing.lanes
        assert pairs <= CLUSTERS[cluster]
        assert has_the_bits_of(slicing, slicing_of(kv_format, 128))
        assert slicing.depth >= 2
        assert slicing.specialized == (longest > 1024)
        assert slicing.threads == 64 * (1 + slicing.specialized)
    assert spread_of(16, 8, kv_format, 128, block_size=64, longest=1 << 20)[1] == 4


def test_lanes_of_long_contexts_of_codes_have_two_warps_while_blocks_have_multiprocessors() -> None:
    def has_two(
        kv_format: str, pairs: int, *, longest: int = 1025, num_rows: int = 8, head_dim: int = 128
    ) -> bool:
        slicing, _ = spread_of(pairs, num_rows, kv_format, head_dim, block_size=64, longest=longest)
        return slicing.specialized

    for kv_format in ALL_FORMATS:
        coded = kv_format != "BF16"
        assert [has_two(kv_format, pairs) for pairs in (15, 16, 30, 31)] == [True, coded, coded, False]
        assert not has_two(kv_format, 8, longest=1024)
        assert not has_two(kv_format, 16, num_rows=9)
        assert not has_two(kv_format, 16, head_dim=256)


def test_two_slices_are_on_their_way_while_every_block_has_a_multiprocessor_to_itself() -> None:
    def depth(
        pairs: int, num_rows: int = 4, kv_format: str = "BF16", head_dim: int = 128, block_size: int = 64
    ) -> int:
        slicing, cluster = spread_of(
            pairs, num_rows, kv_format, head_dim, block_size=block_size, longest=1024
        )
        each = replace(variant_of(kv_format, head_dim, cluster=cluster), slicing=slicing)
        assert each.shared_bytes(num_rows) + STATIC_BYTES + RESERVED_BYTES <= MULTIPROCESSOR_BYTES
        return slicing.depth

    assert [depth(pairs) for pairs in (1, 16, 30, 31, 60, 61, 66, 67, 512)] == [2, 2, 2, 1, 1, 2, 2, 1, 1]
    assert depth(16, num_rows=9) == depth(16, head_dim=256) == 1
    assert depth(67, kv_format="INT8_TOKEN_HEAD", block_size=16) == 2, "codes are fewer bytes"


def test_more_pairs_have_two_small_blocks_each_where_the_last_round_would_be_thin() -> None:
    def dealt(
        kv_format: str, *, num_rows: int = 4, head_dim: int = 128, longest: int = 1024
    ) -> list[tuple[int, int]]:
        spreads = [
            spread_of(8 * requests, num_rows, kv_format, head_dim, block_size=16, longest=longest)
            for requests in (16, 24, 32, 40, 48, 64, 66, 67, 256)
        ]
        cut = slicing_of(kv_format, head_dim)
        assert all(has_the_bits_of(slicing, cut) for slicing, _ in spreads)
        return [(slicing.warps, cluster) for slicing, cluster in spreads]

    expected = [(4, 2), (2, 2), (2, 2), (2, 2), (4, 1), (2, 2), (2, 2), (4, 1), (4, 1)]
    assert dealt("BF16") == dealt("BF16", num_rows=8) == expected
    assert dealt("FP8_TOKEN_HEAD") == [(4, 2), (4, 2), *expected[2:]]
    long = [(4, cluster) for _, cluster in expected]
    assert dealt("BF16", longest=1025) == dealt("INT8_TOKEN_HEAD", longest=1 << 20) == long
    assert dealt("INT4_TOKEN_HEAD")[3:] == [(4, 1)] * 6
    assert {cluster for _, cluster in dealt("BF16", num_rows=9)} == {2}
    assert {warps for warps, _ in dealt("BF16", head_dim=256)} == {4}


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_sums_of_a_block_of_its_own_fit_where_its_tiles_were(kv_format: str) -> None:
    for head_dim in head_dims(kv_format):
        for eights in (1, 2):
            each = variant_of(kv_format, head_dim, row_eights=eights, cluster=1)
            assert each.sent_bytes(8 * eights) <= each.tile_bytes // 4
            assert each.shared_bytes(8 * eights) == each.tile_bytes


def test_three_blocks_of_their_own_fit_a_multiprocessor() -> None:
    static, reserved, total = STATIC_BYTES, RESERVED_BYTES, MULTIPROCESSOR_BYTES
    assert 2 * (TWO_BLOCKS_BYTES + static + reserved) <= total < 3 * (TWO_BLOCKS_BYTES + reserved)
    assert ONE_BLOCK_BYTES + static + reserved <= total < 2 * (ONE_BLOCK_BYTES + reserved)
    for kv_format, cluster in (
        ("BF16", 1),
        ("FP8_TOKEN_HEAD", 1),
        ("INT8_TOKEN_HEAD", 1),
        ("INT4_TOKEN_HEAD", 4),
    ):
        each = variant_of(kv_format, 128, cluster=cluster)
        assert 3 * (each.shared_bytes(8) + static + reserved) <= total


def test_one_block_of_sections_has_a_multiprocessor_to_itself_while_there_are_as_many() -> None:
    for cluster, most in ((1, 132), (2, 66)):
        each = variant_of("INT4_TOKEN_HEAD", 128, cluster=cluster, divided=True, row_eights=2)
        asked = [each.asked_bytes(16, pairs) for pairs in (most, most + 1)]
        assert asked == [ONE_BLOCK_BYTES, each.shared_bytes(16)]
        of_two = [each.asked_bytes(17, pairs) for pairs in (most // 2, most // 2 + 1)]
        assert of_two == [ONE_BLOCK_BYTES, each.shared_bytes(17)], "two blocks for the rows of a pair"
        assert replace(each, divided=False).asked_bytes(16, 1) == each.shared_bytes(16)
    of_four = variant_of("INT4_TOKEN_HEAD", 128, cluster=4, divided=True)
    assert of_four.asked_bytes(8, 1) == of_four.shared_bytes(8)


def test_it_serves_hopper_in_sixteen_bits_and_says_why_not_elsewhere() -> None:
    for kv_format in ALL_FORMATS:
        assert select(replace(HOPPER, scheme=kv_format)).name == "cuda.lanes"
    for changed, reason in (
        ({"sm": 80}, "sm_90"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"n": 72}, "multiple of 16"),
        ({"n": 512}, "256"),
        ({"n": 80, "scheme": "INT4_TOKEN_HEAD"}, "16 bytes"),
    ):
        assert reason in refusals(replace(HOPPER, **changed))["cuda.lanes"]
