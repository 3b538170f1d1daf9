"""Paged keys and values: one pair of tensors a layer (widths may differ), one set of block ids for all layers, and who holds which block.

A block is `block_size` consecutive positions of one sequence. Layout of a layer: [K, num_blocks, block_size, C], so that the blocks of one
sequence gathered along axis 1 are a dense [K, L, C], the operand of an attention product, without another copy. Block 0 belongs to
nobody: block tables are padded with it, and rows that only fill up a batch write there. Formats are those of `kernels/operands/paged.py`.
"""

from collections.abc import Sequence

import torch

from compress.errors import UsageError
from compress.kernels.operands.paged import (
    DENSE_FORMATS,
    FP8_STATIC,
    FP8_TOKEN_HEAD,
    INT4_TOKEN_HEAD,
    INT_FORMATS,
    PADDING_BLOCK,
    TOKEN_HEAD_FORMATS,
    PagedKV,
)
from compress.kernels.operands.rows import FP8
from compress.models.arch import Arch, LayerShape

BLOCK_SIZES = (16, 32, 64, 128)
KV_FORMATS = (*DENSE_FORMATS.values(), *TOKEN_HEAD_FORMATS, FP8_STATIC)
_SCALE_BYTES = 4


def kv_bytes_per_token(arch: Arch, kv_format: str) -> int:
    """Bytes of keys and values of one position, all layers, scales included."""
    dtype = _storage_dtype(kv_format)
    scale_bytes = _SCALE_BYTES if kv_format in TOKEN_HEAD_FORMATS else 0
    return sum(
        2 * layer.num_kv_heads * (_stored_dim(layer, kv_format) * dtype.itemsize + scale_bytes)
        for layer in arch.layers
    )


def _storage_dtype(kv_format: str) -> torch.dtype:
    plain = {name: dtype for dtype, name in (DENSE_FORMATS | INT_FORMATS).items()}
    if kv_format not in KV_FORMATS:
        raise UsageError(f"KV cache format '{kv_format}' is not known; formats are {', '.join(KV_FORMATS)}.")
    return plain.get(kv_format, FP8)


def _stored_dim(layer: LayerShape, kv_format: str) -> int:
    """Elements of one position and head.

    Raises:
        UsageError: an odd head cannot be packed in pairs.
    """
    if kv_format != INT4_TOKEN_HEAD:
        return layer.head_dim
    if layer.head_dim % 2:
        raise UsageError(
            f"KV cache format {INT4_TOKEN_HEAD} packs pairs of dimensions, and heads have {layer.head_dim}; choose another format."
        )
    return layer.head_dim // 2


class KVCache:
    """The tensors. Blocks are addressed by id, positions by slot = block id * block_size + offset.

    `static_scales` are the scales (of keys, of values) of every layer, for format FP8_STATIC.

    Raises:
        UsageError: an unknown format, a static one without scales, or a block size that attention's chunks are not multiples of.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: str,
        device: torch.device,
        static_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        if block_size not in BLOCK_SIZES:
            raise UsageError(
                f"block_size is {block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}."
            )
        if kv_format == FP8_STATIC and static_scales is None:
            raise UsageError(
                f"KV cache format {FP8_STATIC} needs a calibrated scale for the keys and the values of every layer, and this model has "
                f"none. Quantize it with `kv_cache: fp8`, which finds them; {FP8_TOKEN_HEAD} finds its scales as positions are written."
            )
        self.block_size = block_size
        self.kv_format = kv_format
        scales = static_scales if static_scales is not None else [(1.0, 1.0)] * arch.num_layers
        self._layers = [
            _make_pages(
                layer,
                num_blocks=num_blocks,
                block_size=block_size,
                kv_format=kv_format,
                device=device,
                static_scales=pair,
            )
            for layer, pair in zip(arch.layers, scales, strict=True)
        ]

    def layer(self, layer_idx: int) -> PagedKV:
        return self._layers[layer_idx]


def _make_pages(
    layer: LayerShape,
    *,
    num_blocks: int,
    block_size: int,
    kv_format: str,
    device: torch.device,
    static_scales: tuple[float, float],
) -> PagedKV:
    """Zeroed pages of one layer."""
    shape = (layer.num_kv_heads, num_blocks, block_size)
    dtype = _storage_dtype(kv_format)
    k, v = (torch.zeros(*shape, _stored_dim(layer, kv_format), dtype=dtype, device=device) for _ in range(2))
    if kv_format in TOKEN_HEAD_FORMATS:
        return PagedKV(k, v, *(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)))
    if kv_format == FP8_STATIC:
        return PagedKV(
            k, v, *(torch.tensor(scale, dtype=torch.float32, device=device) for scale in static_scales)
        )
    return PagedKV(k, v)


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
