"""The choice of blocks by an indexer over its paged keys: the scores of a row and of some of its blocks a
program, the largest of them (`index_choice/largest.py`), and the slots of the chosen blocks.

Keys of pooled blocks are computed anew in each call, and their sums in the order of positions, so that the
bits of a row depend on the row and on its sequence alone.

Shapes: T rows, N heads of the indexer, I dimensions of a head, J blocks of the indexer, M of them chosen, W
positions of these.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.index_choice.largest import largest
from compress.kernels.operands import index_keys
from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.index_keys import POSITIONS, indexer_refusal, padded, programs_of_row, slots_at
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, register

POOLED = 16
"""Pooled blocks of a program."""
SLOTS = 1024
"""Slots that a program writes."""


@jit(varying=("table_stride", "num_blocks"))
def _scores_of_positions(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_blocks: tl.tensor,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    N2: tl.constexpr,
    WIDTH2: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the largest product of each block [T, N, J] with its positions up to the row's, infinity where
    the block is always chosen."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = POSITIONS // INNER
    place = tl.arange(0, POSITIONS)
    head = tl.arange(0, N2)
    number = tl.arange(0, WIDTH2)
    given = (head < N)[:, None] & (number < WIDTH)[None, :]
    wait(PDL)
    end = tl.load(ends_ptr + row).to(tl.int32)
    q = tl.load(q_ptr + (row * N + head[:, None]) * WIDTH + number[None, :], mask=given, other=0.0)
    last = (end - 1) // SIZE
    for first in range(tl.program_id(1) * BLOCKS, last + 1, tl.num_programs(1) * BLOCKS):
        scores = tl.full([N2, BLOCKS], float("-inf"), dtype=tl.float32)
        for begin in range(0, SIZE, INNER):
            inner = begin + place % INNER
            positions = (first + place // INNER) * SIZE + inner
            real = (inner < SIZE) & (positions < end)
            slots = slots_at(table_ptr + row * table_stride, positions, real, BLOCK_SIZE)
            at = slots[None, :] * WIDTH + number[:, None]
            k = tl.load(keys_ptr + at, mask=real[None, :] & (number < WIDTH)[:, None], other=0.0)
            products = tl.dot(q, k, input_precision=PRECISION)
            products = tl.where(real[None, :], products, float("-inf"))
            scores = tl.maximum(scores, tl.max(tl.reshape(products, [N2, BLOCKS, INNER]), axis=2))
        block = first + tl.arange(0, BLOCKS)
        is_local = (block <= last) & (block > last - LOCAL)
        scores = tl.where(is_local[None, :], float("inf"), scores)
        into = scores_ptr + (row * N + head[:, None]) * num_blocks + block[None, :]
        tl.store(into, scores, mask=(head < N)[:, None] & (block < num_blocks)[None, :])


@jit(varying=("table_stride", "num_blocks", "num_tables"))
def _scores_of_pooled(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    table_stride: tl.tensor,
    num_blocks: tl.tensor,
    num_tables: tl.tensor,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    N2: tl.constexpr,
    WIDTH2: tl.constexpr,
    SIZE: tl.constexpr,
    TURNING: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    POOLED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the scores [T, J] of blocks that a row sees as a whole."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, N2)
    number = tl.arange(0, WIDTH2)
    HALF: tl.constexpr = TURNING // 2
    turns = number < TURNING
    partner = tl.where(turns, tl.where(number < HALF, number + HALF, number - HALF), number)
    angle = tl.where(number < HALF, number, number - HALF)
    real = (number < WIDTH)[None, :]
    norm = tl.load(norm_ptr + number, mask=number < WIDTH, other=0.0)
    norm_of_partner = tl.load(norm_ptr + partner, mask=number < WIDTH, other=0.0)
    wait(PDL)
    whole = tl.load(ends_ptr + row).to(tl.int32) // SIZE
    given = (head < N)[:, None] & (number < WIDTH)[None, :]
    q = tl.load(q_ptr + (row * N + head[:, None]) * WIDTH + number[None, :], mask=given, other=0.0)
    for first in range(tl.program_id(1) * POOLED, whole, tl.num_programs(1) * POOLED):
        block = first + tl.arange(0, POOLED)
        start = tl.where(block < whole, block * SIZE, 0)
        sums = tl.zeros([POOLED, WIDTH2], dtype=tl.float32)
        sums_of_partner = tl.zeros([POOLED, WIDTH2], dtype=tl.float32)
        for idx in range(SIZE):
            slots = slots_at(table_ptr + row * table_stride, start + idx, block < whole, BLOCK_SIZE)
            keys = keys_ptr + slots[:, None] * WIDTH
            sums += tl.load(keys + number[None, :], mask=real, other=0.0).to(tl.float32)
            sums_of_partner += tl.load(keys + partner[None, :], mask=real, other=0.0).to(tl.float32)
        mean = (sums / SIZE).to(q_ptr.dtype.element_ty)
        mean_of_partner = (sums_of_partner / SIZE).to(q_ptr.dtype.element_ty)
        squares = tl.sum(mean.to(tl.float32) * mean.to(tl.float32), axis=1)
        inverse = tl.rsqrt(squares / WIDTH + eps)[:, None]
        key = _normed(mean, inverse, norm)
        key_of_partner = _normed(mean_of_partner, inverse, norm_of_partner)
        table = tl.minimum(block * SIZE, num_tables - 1)[:, None] * TABLE_WIDTH + angle[None, :]
        cos = tl.load(cos_ptr + table, mask=turns[None, :], other=1.0)
        sin = tl.load(sin_ptr + table, mask=turns[None, :], other=0.0)
        sin = tl.where((number < HALF)[None, :], -sin, sin)
        turned = _product(key, cos).to(tl.float32) + _product(key_of_partner, sin).to(tl.float32)
        products = tl.dot(q, tl.trans(turned.to(q.dtype)), input_precision=PRECISION)
        scores = tl.sum(tl.maximum(products, 0.0), axis=0) * factor
        tl.store(scores_ptr + row * num_blocks + block, scores, mask=block < num_blocks)


@jit()
def _normed(mean: tl.tensor, inverse: tl.tensor, norm: tl.tensor) -> tl.tensor:
    """Return the norm of rows, rounded as the reference of `rms_norm` does."""
    x = mean.to(tl.float32) * inverse
    if norm.dtype == tl.float32:
        y = (x * norm[None, :]).to(mean.dtype)
    else:
        y = (x.to(mean.dtype).to(tl.float32) * norm.to(tl.float32)[None, :]).to(mean.dtype)
    return y


@jit()
def _product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Return x y, rounded to their type."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@jit(varying=("table_stride", "num_positions", "width"))
def _slots_of_blocks(
    blocks_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_positions: tl.tensor,
    width: tl.tensor,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the slots of the positions of blocks, and any of positions beyond the table."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    wait(PDL)
    block = tl.load(blocks_ptr + row * COUNT + at // SIZE, mask=at < width, other=0)
    positions = block * SIZE + at % SIZE
    known = (at < width) & (positions < num_positions)
    slots = slots_at(table_ptr + row // HEADS * table_stride, positions, known, BLOCK_SIZE)
    tl.store(slots_ptr + row * width + at, slots, mask=at < width)


def block_scores(
    q_TNI: Tensor, keys: BlockKeys, pages: PagedLatents, block_table_TB: Tensor, ends_T: Tensor
) -> Tensor:
    """Return the scores, float32 [T, N, J], or [T, 1, J] of a pooled indexer, of rows and of the blocks that
    they see, or see as a whole; others are not written."""
    facts = keys.facts
    num_rows, num_heads, width = q_TNI.shape
    num_positions = block_table_TB.shape[1] * pages.block_size
    num_blocks = triton.cdiv(num_positions, facts.block_size)
    heads = 1 if facts.pooled else num_heads
    scores = torch.empty(num_rows, heads, num_blocks, dtype=torch.float32, device=q_TNI.device)
    shared: dict[str, Any] = {
        "N": num_heads,
        "WIDTH": width,
        "N2": padded(num_heads),
        "WIDTH2": padded(width),
        "SIZE": facts.block_size,
        "BLOCK_SIZE": pages.block_size,
        "PRECISION": "ieee" if q_TNI.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 1,
        **pdl_options(q_TNI.device),
    }
    where = block_table_TB.stride(0), num_blocks
    if facts.pooled:
        # each waits for its keys one after another, so that many at once are faster than few that go on
        _scores_of_pooled[(num_rows, triton.cdiv(num_blocks, POOLED))](
            q_TNI.contiguous(),
            pages.rows,
            keys.norm.weight,
            keys.cos_LC,
            keys.sin_LC,
            block_table_TB,
            ends_T.contiguous(),
            scores,
            keys.norm.eps,
            facts.head_dim**-0.5,
            *where,
            len(keys.cos_LC),
            TURNING=keys.rotary_dim,
            TABLE_WIDTH=keys.cos_LC.shape[1],
            POOLED=POOLED,
            **shared,
        )
    else:
        inner = min(POSITIONS, triton.next_power_of_2(facts.block_size))
        num_parts = triton.cdiv(num_blocks, POSITIONS // inner)
        _scores_of_positions[(num_rows, programs_of_row(num_rows, num_parts))](
            q_TNI.contiguous(),
            pages.rows,
            block_table_TB,
            ends_T.contiguous(),
            scores,
            *where,
            INNER=inner,
            LOCAL=facts.local_blocks,
            POSITIONS=POSITIONS,
            **shared,
        )
    return scores


def block_choice(
    q_TNI: Tensor, keys: BlockKeys, pages: PagedLatents, block_table_TB: Tensor, ends_T: Tensor
) -> Tensor:
    """Return the slots of the chosen blocks, int64 [T, N or 1, W] (`reference.py`)."""
    facts = keys.facts
    num_heads = 1 if facts.pooled else q_TNI.shape[1]
    count = facts.top_blocks + facts.pooled
    width = count * facts.block_size
    num_positions = block_table_TB.shape[1] * pages.block_size
    slots_TNW = torch.empty(len(q_TNI), num_heads, width, dtype=torch.int64, device=q_TNI.device)
    at_once = max(1, index_keys.MOST_SCORES // (num_heads * triton.cdiv(num_positions, facts.block_size)))
    for start in range(0, len(q_TNI), at_once):
        own = slice(start, start + at_once)
        scores = block_scores(q_TNI[own], keys, pages, block_table_TB[own], ends_T[own])
        blocks = largest(
            scores.flatten(0, 1), ends_T[own], facts.top_blocks, size=facts.block_size, and_last=facts.pooled
        )
        del scores  # before the next ones are made
        _slots_of_blocks[(len(blocks), triton.cdiv(width, SLOTS))](
            blocks,
            block_table_TB[own],
            slots_TNW[own],
            block_table_TB.stride(0),
            num_positions,
            width,
            HEADS=num_heads,
            COUNT=count,
            SIZE=facts.block_size,
            BLOCK_SIZE=pages.block_size,
            SLOTS=SLOTS,
            num_warps=4,
            **pdl_options(q_TNI.device),
        )
    return slots_TNW


register(
    Kernel("block_choice", "triton.paged", min_sm=80, priority=10, supports=indexer_refusal, fn=block_choice)
)
