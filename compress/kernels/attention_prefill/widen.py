"""Pages of codes in the dtype of the queries, before prefill attention reads them."""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.operands.e4m3 import e4m3_values
from compress.kernels.operands.paged import CODED_FORMATS, PagedKV
from compress.kernels.operands.tiles import FixedLists, dense_blocks


@jit()
def _values(page_ptr: tl.tensor, columns: tl.tensor, mask: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Load codes and return their float32 values."""
    if FORMAT == 4:
        codes = tl.load(page_ptr + columns // 2, mask=mask, other=0).to(tl.int32)
        return ((codes >> columns % 2 * 4 & 0xF) - 8).to(tl.float32)
    codes = tl.load(page_ptr + columns, mask=mask, other=0)
    return codes.to(tl.int8, bitcast=True).to(tl.float32) if FORMAT == 3 else e4m3_values(codes)


@jit(unaligned=("table_ptr",))
def _widen_pages(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    v_out_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_blocks: tl.tensor,
    C: tl.constexpr,
    C_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Dequantize one block of one head, keys and values: codes times their scales, in the queries' dtype."""
    launch_dependents(PDL)
    wait(PDL)
    entry_ptr = blocks_ptr + tl.program_id(0) * 3
    kv_head = tl.program_id(1).to(tl.int64)
    block = tl.load(table_ptr + tl.load(entry_ptr).to(tl.int64) * table_stride + tl.load(entry_ptr + 1)).to(
        tl.int64
    )
    offsets = tl.arange(0, BLOCK_SIZE)
    columns = tl.arange(0, C_TILE)
    within = offsets[:, None] * C + columns[None, :]
    mask = (columns < C)[None, :]
    source = (kv_head * num_blocks + block) * BLOCK_SIZE
    target = (kv_head * tl.num_programs(0) + tl.program_id(0)) * BLOCK_SIZE
    scale_at = 0 * offsets if FORMAT == 2 else source + offsets
    STORED: tl.constexpr = C // 2 if FORMAT == 4 else C
    rows = (source + offsets[:, None]) * STORED
    k = _values(k_ptr + rows, columns[None, :], mask, FORMAT) * tl.load(k_scale_ptr + scale_at)[:, None]
    v = _values(v_ptr + rows, columns[None, :], mask, FORMAT) * tl.load(v_scale_ptr + scale_at)[:, None]
    tl.store(k_out_ptr + target * C + within, k.to(k_out_ptr.dtype.element_ty), mask=mask)
    tl.store(v_out_ptr + target * C + within, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def widened(
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens: tuple[int, ...],
    dtype: torch.dtype,
    lists: FixedLists | None = None,
) -> tuple[PagedKV, Tensor]:
    """Return the blocks of these contexts in `dtype`, and the block table that finds them. This is one pass
    over memory, where every tile of queries would dequantize its own keys in registers (3.7 times slower
    at 2,048 queries on an H200)."""
    num_kv_heads, num_blocks, block_size, _ = kv.k.shape
    head_dim = kv.head_dim
    assert kv.k_scale is not None
    assert kv.k.is_contiguous()
    blocks, table_RB = (
        dense_blocks(context_lens, block_size, block_table_RB.device)
        if lists is None
        else lists.dense_blocks(block_size)
    )
    k, v = (
        torch.empty(num_kv_heads, len(blocks), block_size, head_dim, dtype=dtype, device=kv.k.device)
        for _ in range(2)
    )
    _widen_pages[(len(blocks), num_kv_heads)](
        kv.k.view(torch.uint8),
        kv.v.view(torch.uint8),
        kv.k_scale,
        kv.v_scale,
        block_table_RB,
        blocks,
        k,
        v,
        block_table_RB.stride(0),
        num_blocks,
        C=head_dim,
        C_TILE=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        FORMAT=CODED_FORMATS[kv.format],
        **pdl_options(kv.k.device),
    )
    return PagedKV(k, v), table_RB
