"""Keys and values of FP8_ATTENTION pages, laid out for products in FP8 (`fp8.cu`): tiles of 128 positions,
each a head's, whose numbers have one scale.

    tile of keys     128 rows of 128 bytes: a key, its channels in order
    tile of values   a row of 128 bytes for each channel, its keys in the order of `key_at`, then 8 rows:
                     one of ones, and one that begins with two scales in float32, of keys and of values

In a row r of keys or of a channel, piece p of 16 bytes is at place p ^ (r % 8), as the copy engine would
swizzle it. Positions beyond the context are zeros; what is stated of no byte is not written. The scale of a
tile is the largest of its positions'. All are powers of two, so codes change nothing but their exponents,
down to the least of the format.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.attention_prefill.fp8_reference import KEYS
from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, wait
from compress.kernels.operands.e4m3 import converts_e4m3, e4m3, e4m3_float16, larger
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.tiles import FixedLists, dense_blocks
from compress.quant.kv import FP8_ATTENTION

MORE_ROWS = 8
"""Rows of a tile of values below its channels: numbers of columns of a product are multiples of 8."""
ONE = 0x38
"""1 in e4m3."""


@dataclass(frozen=True)
class KeyTiles:
    """Tiles uint8, of keys [K, N, 128, 128] and of values [K, N, C + 8, 128], and the number int32 [R, ...]
    of each tile of each sequence."""

    k: Tensor
    v: Tensor
    table: Tensor


@jit()
def key_at(place: tl.tensor) -> tl.tensor:
    """Return the key at a place of a row of values: a thread that has keys 2 t and 2 t + 1 of each eight has
    places 4 t to 4 t + 3 of each sixteen."""
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2


@jit()
def _rounded(
    page_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    slots: tl.tensor,
    real: tl.tensor,
    columns: tl.tensor,
    C: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes [keys, C] under one scale, and the scale; NaN if one is."""
    codes = tl.load(page_ptr + slots[:, None] * C + columns[None, :], mask=real[:, None], other=0)
    scales = tl.load(scale_ptr + slots, mask=real, other=0.0)
    values = e4m3_float16(codes).to(tl.float32) * scales[:, None]
    scale = tl.reduce(scales, 0, larger)
    return e4m3(values, scale + tl.zeros_like(values), CONVERTS), scale


@jit(unaligned=("table_ptr",))
def _lay_out(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    v_out_ptr: tl.tensor,
    scales_out_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_slots: tl.tensor,
    C: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    ONE: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Lay out one tile of one head; an entry without positions has none."""
    launch_dependents(PDL)
    wait(PDL)
    entry_ptr = blocks_ptr + tl.program_id(0) * 3
    kv_head = tl.program_id(1).to(tl.int64)
    tile = kv_head * tl.num_programs(0) + tl.program_id(0)
    table_ptr += tl.load(entry_ptr).to(tl.int64) * table_stride
    first = tl.load(entry_ptr + 1) * KEYS
    count = tl.load(entry_ptr + 2)
    if count == 0:
        return
    places = tl.arange(0, KEYS)
    columns = tl.arange(0, C)
    k_ptr += kv_head * num_slots * C
    v_ptr += kv_head * num_slots * C
    k_scale_ptr += kv_head * num_slots
    v_scale_ptr += kv_head * num_slots

    block = tl.load(table_ptr + (first + places) // BLOCK_SIZE, mask=places < count, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + (first + places) % BLOCK_SIZE
    k, k_scale = _rounded(k_ptr, k_scale_ptr, slots, places < count, columns, C, CONVERTS)
    within = (columns[None, :] // 16 ^ places[:, None] % 8) * 16 + columns[None, :] % 16
    tl.store(k_out_ptr + tile * KEYS * 128 + places[:, None] * 128 + within, k)

    keys = key_at(places)
    block = tl.load(table_ptr + (first + keys) // BLOCK_SIZE, mask=keys < count, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + (first + keys) % BLOCK_SIZE
    v, v_scale = _rounded(v_ptr, v_scale_ptr, slots, keys < count, columns, C, CONVERTS)
    v_out_ptr += tile * (C + MORE_ROWS) * 128
    within = (places[None, :] // 16 ^ columns[:, None] % 8) * 16 + places[None, :] % 16
    tl.store(v_out_ptr + columns[:, None] * 128 + within, tl.trans(v))
    tl.store(v_out_ptr + C * 128 + places, tl.full([KEYS], ONE, tl.uint8))
    scales_at = scales_out_ptr + (tile * (C + MORE_ROWS) + C + 1) * 32
    tl.store(scales_at, k_scale)
    tl.store(scales_at + 1, v_scale)


def laid_out(
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens: tuple[int, ...],
    lists: FixedLists | None = None,
) -> KeyTiles:
    """Return the tiles of these contexts: one pass over memory, where every tile of queries would transpose
    the values that it reads."""
    num_kv_heads, num_blocks, block_size, head_dim = kv.k.shape
    assert kv.format == FP8_ATTENTION
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    assert all(each.is_contiguous() for each in (kv.k, kv.v, kv.k_scale, kv.v_scale))
    device = kv.k.device
    blocks, table = dense_blocks(context_lens, KEYS, device) if lists is None else lists.dense_blocks(KEYS)
    k, v = (
        torch.empty(num_kv_heads, len(blocks), rows, KEYS, dtype=torch.uint8, device=device)
        for rows in (KEYS, head_dim + MORE_ROWS)
    )
    _lay_out[(len(blocks), num_kv_heads)](
        kv.k.view(torch.uint8),
        kv.v.view(torch.uint8),
        kv.k_scale,
        kv.v_scale,
        block_table_RB,
        blocks,
        k,
        v,
        v.view(torch.float32),
        block_table_RB.stride(0),
        num_blocks * block_size,
        C=head_dim,
        BLOCK_SIZE=block_size,
        KEYS=KEYS,
        MORE_ROWS=MORE_ROWS,
        ONE=ONE,
        CONVERTS=converts_e4m3(device),
        num_warps=8,
        **pdl_options(device),
    )
    return KeyTiles(k, v, table)
