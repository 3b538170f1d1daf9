"""Paged keys and values: one pair of tensors a layer (widths may differ), one set of block ids for all layers, and who holds which block.

A block is `block_size` consecutive positions of one sequence. Layout of a layer: [K, num_blocks, block_size, C], so that the blocks of one
sequence gathered along axis 1 are a dense [K, L, C], the operand of an attention product, without another copy. Block 0 belongs to
nobody and stays zero: block tables are padded with it.
"""

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch

BLOCK_SIZES = (16, 32, 64, 128)
PADDING_BLOCK = 0


def kv_bytes_per_token(arch: Arch, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one position, all layers."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * dtype.itemsize


class KVCache:
    """The tensors. Blocks are addressed by id, positions by slot = block id * block_size + offset.

    Raises:
        UsageError: a block size that attention's chunks are not multiples of.
    """

    def __init__(self, arch: Arch, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if block_size not in BLOCK_SIZES:
            raise UsageError(f"block_size is {block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}.")
        self.block_size = block_size
        self._layers = [
            (
                torch.zeros(layer.num_kv_heads, num_blocks, block_size, layer.head_dim, dtype=dtype, device=device),
                torch.zeros(layer.num_kv_heads, num_blocks, block_size, layer.head_dim, dtype=dtype, device=device),
            )
            for layer in arch.layers
        ]

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [K, num_blocks, block_size, C]."""
        return self._layers[layer_idx]

    def write_(self, layer_idx: int, slot_mapping_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Store new positions, rounded to the cache's dtype."""
        for cache, new_TKC in zip(self._layers[layer_idx], (k_TKC, v_TKC), strict=True):
            flat = cache.view(cache.shape[0], -1, cache.shape[3])
            flat.index_copy_(1, slot_mapping_T, new_TKC.transpose(0, 1).to(cache.dtype))

    def gather(self, layer_idx: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` positions of the sequence that holds `blocks`: keys and values, each [K, length, C]."""
        blocks = blocks[: -(-length // self.block_size)]
        k, v = (cache.index_select(1, blocks).flatten(1, 2)[:, :length] for cache in self._layers[layer_idx])
        return k, v


class BlockAllocator:
    """Which blocks are free. Last freed, first reused: its lines are the likeliest to be in a cache."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks; the caller has asked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        assert self._held.issuperset(blocks), "a block is freed that nobody holds"
        self._held.difference_update(blocks)
        self._free.extend(reversed(blocks))
