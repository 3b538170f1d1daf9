"""Paged keys and values: what is written is read back, and blocks have one holder."""

import pytest
import torch

from compress.errors import UsageError
from compress.kernels.operands.paged import CODED_FORMATS, PADDING_BLOCK, dequantized
from compress.kernels.problem import Problem
from compress.kernels.select import refusals, select
from compress.runtime.block_pool import BlockPool
from compress.runtime.kv_cache import KVCache, kv_bytes_per_token
from tests.support.tiny_decoder import tiny_arch

CPU = torch.device("cpu")


def test_positions_are_read_back_in_order_from_scattered_blocks() -> None:
    arch = tiny_arch()
    layer = arch.layers[1]
    cache = KVCache(arch, num_blocks=9, block_size=16, kv_format="F32", device=CPU)
    tables = {"a": [7, 2, 5], "b": [1, 8]}
    lengths = {"a": 41, "b": 32}
    written = {}
    for name, blocks in tables.items():
        k, v = torch.randn(
            2,
            lengths[name],
            layer.num_kv_heads,
            layer.head_dim,
            generator=torch.Generator().manual_seed(len(name + str(blocks))),
        )
        slots = torch.tensor(
            [blocks[position // 16] * 16 + position % 16 for position in range(lengths[name])]
        )
        for rows in (slice(0, 1), slice(1, 20), slice(20, None)):  # as decodes and chunks write them
            cache.layer(1).write_(slots[rows], k[rows], v[rows])
        written[name] = (k, v)
    for name, blocks in tables.items():
        padded = torch.tensor([*blocks, PADDING_BLOCK, PADDING_BLOCK])
        for read, expected in zip(
            cache.layer(1).gather(padded, lengths[name], torch.float32), written[name], strict=True
        ):
            assert torch.equal(read.transpose(0, 1), expected)
    assert not cache.layer(1).k[:, PADDING_BLOCK].any()
    assert not cache.layer(0).k.any()
    assert not cache.layer(0).v.any()


@pytest.mark.parametrize(("kv_format", "bits"), [("FP8_TOKEN_HEAD", 3), ("FP8_STATIC", 3), ("BF16", 7)])
def test_formats_round_once_to_their_grid(kv_format: str, bits: int) -> None:
    arch = tiny_arch()
    layer = arch.layers[0]
    scales = [(1.0, 1.0)] * arch.num_layers
    pages = KVCache(
        arch, num_blocks=3, block_size=16, kv_format=kv_format, device=CPU, static_scales=scales
    ).layer(0)
    k, v = torch.randn(2, 9, layer.num_kv_heads, layer.head_dim, generator=torch.Generator().manual_seed(0))
    pages.write_(torch.arange(20, 29), k, v)
    for stored, scale, written in zip(
        (pages.k, pages.v), (pages.k_scale, pages.v_scale), (k, v), strict=True
    ):
        read = dequantized(stored, scale, torch.float32).flatten(1, 2)[:, 20:29].transpose(0, 1)
        # Half a unit of the last of `bits` mantissa bits; near zero e4m3 has steps of 2^-9 of its scale.
        step = torch.maximum(
            written.abs() * 2.0 ** -(bits + 1), written.abs().amax(-1, keepdim=True).clamp_min(1.0) * 2.0**-10
        )
        assert bool(((read - written).abs() <= step).all())
        assert not torch.equal(read, written)


def test_static_scales_are_never_made_up() -> None:
    with pytest.raises(UsageError, match="FP8_TOKEN_HEAD finds its scales"):
        KVCache(tiny_arch(), num_blocks=3, block_size=16, kv_format="FP8_STATIC", device=CPU)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="'INT3' is not known"):
        KVCache(tiny_arch(), num_blocks=3, block_size=16, kv_format="INT3", device=CPU)


def test_layers_have_tensors_of_their_own_width() -> None:
    arch = tiny_arch()
    wide, *rest = arch.layers
    arch = arch.replace(layers=(wide, *(type(wide)(1, 1, 24, 48, wide.rope) for _ in rest)))
    cache = KVCache(arch, num_blocks=3, block_size=32, kv_format="BF16", device=CPU)
    assert [tuple(cache.layer(idx).k.shape) for idx in range(3)] == [
        (2, 3, 32, 8),
        (1, 3, 32, 24),
        (1, 3, 32, 24),
    ]
    total = sum(2 * pages.k.numel() * pages.k.element_size() for pages in map(cache.layer, range(3)))
    assert total == kv_bytes_per_token(arch, "BF16") * 3 * 32


def test_a_block_size_that_attention_cannot_chunk_is_refused() -> None:
    with pytest.raises(UsageError, match="block_size is 24"):
        KVCache(tiny_arch(), num_blocks=3, block_size=24, kv_format="F32", device=CPU)


def test_every_block_but_the_padding_block_is_handed_out_once() -> None:
    allocator = BlockPool(8)
    first = allocator.allocate(3)
    second = allocator.allocate(4)
    assert sorted(first + second) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0
    allocator.free(first)
    assert sorted(allocator.allocate(3)) == sorted(first)


def test_a_block_is_freed_by_its_holder_only() -> None:
    allocator = BlockPool(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    for not_held in (blocks[:1], [PADDING_BLOCK]):
        with pytest.raises(AssertionError, match="was not taken"):
            allocator.free(not_held)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        allocator.allocate(4)


@pytest.mark.parametrize(
    ("kv_format", "largest", "bytes_per_head"),
    [("INT8_TOKEN_HEAD", 127, 8 + 4), ("INT4_TOKEN_HEAD", 7, 4 + 4)],
)
def test_integers_are_the_nearest_of_their_position_and_head(
    kv_format: str, largest: int, bytes_per_head: int
) -> None:
    arch = tiny_arch()
    layer = arch.layers[0]
    cache = KVCache(arch, num_blocks=3, block_size=16, kv_format=kv_format, device=CPU)
    k, v = torch.randn(2, 20, layer.num_kv_heads, layer.head_dim, generator=torch.Generator().manual_seed(0))
    k[3] *= 1000
    v[4] = 0
    cache.layer(0).write_(torch.arange(16, 36), k, v)
    assert cache.layer(0).format == kv_format
    assert cache.layer(0).empty_like(2, 32).format == kv_format
    assert kv_bytes_per_token(arch, kv_format) == sum(
        2 * each.num_kv_heads * bytes_per_head for each in arch.layers
    )
    for read, written in zip(
        cache.layer(0).gather(torch.tensor([1, 2]), 20, torch.float32), (k, v), strict=True
    ):
        step = written.double().abs().amax(-1, keepdim=True) / largest
        expected = (written.double() / step.clamp_min(1e-30)).round() * step
        torch.testing.assert_close(read.transpose(0, 1).double(), expected, rtol=1e-6, atol=0)
        assert int((read.transpose(0, 1) / step.clamp_min(1e-30)).round().unique().abs().max()) == largest


def test_odd_heads_are_not_packed_in_pairs() -> None:
    arch = tiny_arch()
    odd = arch.replace(layers=tuple(type(each)(1, 1, 7, 48, each.rope) for each in arch.layers))
    with pytest.raises(UsageError, match="packs pairs"):
        KVCache(odd, num_blocks=3, block_size=16, kv_format="INT4_TOKEN_HEAD", device=CPU)


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("kv_format", ["BF16", *CODED_FORMATS])
def test_every_format_has_fast_kernels(kv_format: str, sm: int) -> None:
    for op in ("rope_store", "attention_decode", "attention_prefill"):
        asked = Problem(
            op, 128, 4, 1, 8, True, kv_format, torch.bfloat16, "cuda", sm  # type: ignore[arg-type]
        )  # fmt: skip
        assert "reference" not in select(asked).name


def test_a_head_whose_halves_are_no_whole_bytes_is_stored_by_the_reference() -> None:
    asked = Problem(
        "rope_store", 18, 4, 1, 8, True, "INT4_TOKEN_HEAD", torch.bfloat16, "cuda", 90
    )  # fmt: skip
    assert "whole number of bytes" in refusals(asked)["triton.fused"]
    assert select(asked).name == "reference"
