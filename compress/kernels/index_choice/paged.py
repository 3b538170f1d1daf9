"""The choice of positions by an indexer over its paged keys: the scores of a row and of a part of its
positions a program, by matrix products of all heads, and the largest of them (`largest.py`).

Shapes: T rows, H heads, I numbers of a key, P positions of a table of B blocks, K slots chosen.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.index_choice.largest import largest
from compress.kernels.operands import index_keys
from compress.kernels.operands.index_keys import POSITIONS, indexer_refusal, padded, programs_of_row, slots_at
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, register


@jit(varying=("table_stride", "num_positions"))
def _scores(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_positions: tl.tensor,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    H2: tl.constexpr,
    WIDTH2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the scores of some of the positions that a row sees."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, POSITIONS)
    head = tl.arange(0, H2)
    number = tl.arange(0, WIDTH2)
    given = (head < H)[:, None] & (number < WIDTH)[None, :]
    wait(PDL)
    end = tl.load(ends_ptr + row).to(tl.int32)
    q = tl.load(q_ptr + (row * H + head[:, None]) * WIDTH + number[None, :], mask=given, other=0.0)
    weights = tl.load(weights_ptr + row * H + head, mask=head < H, other=0.0)
    for start in range(tl.program_id(1) * POSITIONS, end, tl.num_programs(1) * POSITIONS):
        positions = start + place
        slots = slots_at(table_ptr + row * table_stride, positions, positions < end, BLOCK_SIZE)
        real = (positions < end)[None, :] & (number < WIDTH)[:, None]
        k = tl.load(keys_ptr + slots[None, :] * WIDTH + number[:, None], mask=real, other=0.0)
        products = tl.dot(q, k, input_precision=PRECISION)
        scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], axis=0)
        tl.store(scores_ptr + row * num_positions + positions, scores, mask=positions < end)


def index_scores(
    q_THI: Tensor, weights_TH: Tensor, pages: PagedLatents, block_table_TB: Tensor, ends_T: Tensor
) -> Tensor:
    """Return the scores, float32 [T, P], of rows and of the positions that they see; others are not
    written."""
    num_rows, num_heads, width = q_THI.shape
    num_positions = block_table_TB.shape[1] * pages.block_size
    scores_TP = torch.empty(num_rows, num_positions, dtype=torch.float32, device=q_THI.device)
    _scores[(num_rows, programs_of_row(num_rows, triton.cdiv(num_positions, POSITIONS)))](
        q_THI.contiguous(),
        weights_TH.contiguous(),
        pages.rows,
        block_table_TB,
        ends_T.contiguous(),
        scores_TP,
        block_table_TB.stride(0),
        num_positions,
        H=num_heads,
        WIDTH=width,
        H2=padded(num_heads),
        WIDTH2=padded(width),
        BLOCK_SIZE=pages.block_size,
        POSITIONS=POSITIONS,
        PRECISION="ieee" if q_THI.dtype == torch.float32 else "tf32",
        num_warps=8 if num_heads > 32 else 4,
        num_stages=1,
        **pdl_options(q_THI.device),
    )
    return scores_TP


def index_choice(
    q_THI: Tensor,
    weights_TH: Tensor,
    pages: PagedLatents,
    block_table_TB: Tensor,
    ends_T: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """Return the slots [T, K] that rows attend to (`reference.py`)."""
    at_once = max(1, index_keys.MOST_SCORES // (block_table_TB.shape[1] * pages.block_size))
    parts = []
    for start in range(0, len(q_THI), at_once):
        own = slice(start, start + at_once)
        table_TB = block_table_TB[own]
        scores_TP = index_scores(q_THI[own], weights_TH[own], pages, table_TB, ends_T[own])
        parts.append(largest(scores_TP, ends_T[own], top_k, blocks=(table_TB, pages.block_size)))
        del scores_TP  # before the next ones are made
    return parts[0] if len(parts) == 1 else torch.cat(parts)


register(
    Kernel("index_choice", "triton.paged", min_sm=80, priority=10, supports=indexer_refusal, fn=index_choice)
)
