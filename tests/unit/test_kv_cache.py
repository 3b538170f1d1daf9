"""Paged keys and values: what is written is read back, and blocks have one holder."""

import pytest
import torch
from tiny_decoder import tiny_arch

from compress.errors import UsageError
from compress.runtime.kv_cache import PADDING_BLOCK, BlockAllocator, KVCache, kv_bytes_per_token

CPU = torch.device("cpu")


def test_positions_are_read_back_in_order_from_scattered_blocks() -> None:
    arch = tiny_arch()
    layer = arch.layers[1]
    cache = KVCache(arch, num_blocks=9, block_size=16, dtype=torch.float32, device=CPU)
    tables, lengths = {"a": [7, 2, 5], "b": [1, 8]}, {"a": 41, "b": 32}
    written = {}
    for name, blocks in tables.items():
        k, v = torch.randn(
            2, lengths[name], layer.num_kv_heads, layer.head_dim, generator=torch.Generator().manual_seed(len(name + str(blocks)))
        )
        slots = torch.tensor([blocks[position // 16] * 16 + position % 16 for position in range(lengths[name])])
        for rows in (slice(0, 1), slice(1, 20), slice(20, None)):  # as decodes and chunks write them
            cache.write_(1, slots[rows], k[rows], v[rows])
        written[name] = (k, v)
    for name, blocks in tables.items():
        padded = torch.tensor([*blocks, PADDING_BLOCK, PADDING_BLOCK])
        for read, expected in zip(cache.gather(1, padded, lengths[name]), written[name], strict=True):
            assert torch.equal(read.transpose(0, 1), expected)
    assert not cache.layer(1)[0][:, PADDING_BLOCK].any()
    assert not any(tensor.any() for tensor in cache.layer(0))


def test_layers_have_tensors_of_their_own_width() -> None:
    arch = tiny_arch()
    wide, *rest = arch.layers
    arch = arch.replace(layers=(wide, *(type(wide)(1, 1, 24, 48, wide.rope) for _ in rest)))
    cache = KVCache(arch, num_blocks=3, block_size=32, dtype=torch.bfloat16, device=CPU)
    assert [tuple(cache.layer(idx)[0].shape) for idx in range(3)] == [(2, 3, 32, 8), (1, 3, 32, 24), (1, 3, 32, 24)]
    total = sum(tensor.numel() * tensor.element_size() for idx in range(3) for tensor in cache.layer(idx))
    assert total == kv_bytes_per_token(arch, torch.bfloat16) * 3 * 32


def test_a_block_size_that_attention_cannot_chunk_is_refused() -> None:
    with pytest.raises(UsageError, match="block_size is 24"):
        KVCache(tiny_arch(), num_blocks=3, block_size=24, dtype=torch.float32, device=CPU)


def test_every_block_but_the_padding_block_is_handed_out_once() -> None:
    allocator = BlockAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(4)
    assert sorted(first + second) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0
    allocator.free(first)
    assert sorted(allocator.allocate(3)) == sorted(first)


def test_a_block_is_freed_by_its_holder_only() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    for not_held in (blocks[:1], [PADDING_BLOCK]):
        with pytest.raises(AssertionError, match="nobody holds"):
            allocator.free(not_held)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 free"):
        allocator.allocate(4)
