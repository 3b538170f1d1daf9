"""The choice of the largest scores of a row, exact and in the order of positions: the least score that is
chosen is found bit by bit, each by a count of the scores that are no smaller, and a last walk writes what is
chosen. One program a row, which reads its scores once if it holds them all, and otherwise again for each
count; its work depends on the scores that the row sees alone.

Of equal scores the first ones are chosen, as `models/chosen_keys.py` has it.

Shapes: R rows, T of which have ends of their own, P scores, B blocks, K chosen.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait

TILE = 32_768
"""Scores that a program holds, at most."""
OF_A_THREAD = 16
"""Scores of a thread, more where a program has `MOST_WARPS`."""
MOST_WARPS = 32


@jit()
def _ordered(scores_ptr: tl.tensor, at: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Return unsigned integers in the order of scores, one for both zeros, and 0 for what is not seen."""
    score = tl.load(scores_ptr + at, mask=at < seen, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(at < seen, key, 0)


@jit()
def _num_from(keys: tl.tensor, least: tl.tensor) -> tl.tensor:
    return tl.sum((keys >= least).to(tl.int32), axis=0)


@jit()
def _num_above(keys: tl.tensor, least: tl.tensor) -> tl.tensor:
    return tl.sum((keys > least).to(tl.int32), axis=0)


@jit()
def _slots(
    table_ptr: tl.tensor, positions: tl.tensor, read: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Return the slots of positions, or what they are where no blocks are given."""
    if BLOCK_SIZE > 0:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=read, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    else:
        slots = positions.to(tl.int64)
    return slots


@jit(varying=("row_stride", "table_stride"))
def _largest(
    scores_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    AND_LAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    wait(PDL)
    end = tl.load(ends_ptr + row // HEADS).to(tl.int32)
    seen = end // SIZE if AND_LAST else (end + SIZE - 1) // SIZE
    WIDTH: tl.constexpr = COUNT + 1 if AND_LAST else COUNT
    chosen_ptr += row * WIDTH
    table_ptr += row * table_stride
    if seen <= COUNT:
        for start in range(0, WIDTH, TILE):
            at = start + place
            known = at <= seen if AND_LAST else at < seen
            which = _slots(table_ptr, tl.where(known, at, 0), at < WIDTH, BLOCK_SIZE)
            tl.store(chosen_ptr + at, which, mask=at < WIDTH)
    else:
        scores_ptr += row * row_stride
        least = tl.zeros((), dtype=tl.uint32)
        keys = _ordered(scores_ptr, place, seen)
        bit = tl.full((), 0x80000000, dtype=tl.uint32)
        for _ in range(32):
            higher = least | bit
            bit = bit >> 1
            count = _num_from(keys, higher)
            for start in range(TILE, seen, TILE):
                count += _num_from(_ordered(scores_ptr, start + place, seen), higher)
            least = tl.where(count >= COUNT, higher, least)
        missing = tl.full((), COUNT, dtype=tl.int32) - _num_above(keys, least)
        for start in range(TILE, seen, TILE):
            missing -= _num_above(_ordered(scores_ptr, start + place, seen), least)
        num_chosen = tl.zeros((), dtype=tl.int32)
        for start in range(0, seen, TILE):
            at = start + place
            of_tile = _ordered(scores_ptr, at, seen)
            equal = (of_tile == least).to(tl.int32)
            chosen = ((of_tile > least) | ((equal == 1) & (tl.cumsum(equal, axis=0) <= missing))).to(tl.int32)
            into = chosen_ptr + num_chosen + tl.cumsum(chosen, axis=0) - 1
            tl.store(into, _slots(table_ptr, at, chosen > 0, BLOCK_SIZE), mask=chosen > 0)
            num_chosen += tl.sum(chosen, axis=0)
            missing -= tl.sum(equal, axis=0)
        if AND_LAST:
            tl.store(chosen_ptr + COUNT, seen.to(tl.int64))


def largest(
    scores_RP: Tensor,
    ends_T: Tensor,
    count: int,
    *,
    size: int = 1,
    and_last: bool = False,
    blocks: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return where the largest scores of rows are, int64 [R, K], in rising order and zeros after them.

    Args:
        scores_RP: float32, contiguous; those that a row does not see may be anything.
        ends_T: the positions that rows see, of R / T rows each; a score is one of `size` positions.
        count: K, the most that are chosen.
        and_last: a row sees scores of whole positions, and what follows them is chosen besides, so that K is
            one more.
        blocks: the blocks of each row [R, B] and the positions of a block; slots are returned for positions.
    """
    num_rows, num_scores = scores_RP.shape
    table, block_size = (ends_T, 0) if blocks is None else blocks
    chosen_RK = torch.empty(num_rows, count + and_last, dtype=torch.int64, device=scores_RP.device)
    tile = min(TILE, max(512, triton.next_power_of_2(num_scores)))
    _largest[(num_rows,)](
        scores_RP,
        ends_T,
        table,
        chosen_RK,
        num_scores,
        table.stride(0),
        HEADS=num_rows // len(ends_T),
        SIZE=size,
        AND_LAST=and_last,
        COUNT=count,
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=min(MOST_WARPS, max(1, tile // (32 * OF_A_THREAD))),
        **pdl_options(scores_RP.device),
    )
    return chosen_RK
