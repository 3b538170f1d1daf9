"""The choice of the largest scores of a row, exact and in the order of positions. A program holds a tile of
them in registers, finds the least score that is chosen bit by bit, each by a count of the scores that are no
smaller, and writes what is chosen. Where a row has several tiles, further launches choose among those that
each tile chose. Programs of tiles that a row does not see end at once.

Of equal scores the first ones are chosen, as `models/chosen_keys.py` has it.

Shapes: R rows, as many of each of T ends, P scores, B blocks of a table, K chosen.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton, wait
from compress.kernels.operands.index_keys import slots_at

TILE = 8192
"""Scores of a program, more only where more than half of them may be chosen."""
OF_A_THREAD = 16
"""Scores of a thread, more where a program has `MOST_WARPS`."""
MOST_WARPS = 16


@jit()
def _ordered(scores: tl.tensor, known: tl.tensor) -> tl.tensor:
    """Return unsigned integers in the order of scores, one for both zeros, and 0 for what is not known."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.uint32, bitcast=True)
    keys = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(known, keys, 0)


@jit()
def _least(keys: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the largest integer that `COUNT` keys or more are no smaller than, or a smaller one that parts
    the keys alike."""
    least = tl.zeros((), dtype=tl.uint32)
    bit = tl.full((), 0x80000000, dtype=tl.uint32)
    while bit > 0:
        count = tl.sum((keys >= (least | bit)).to(tl.int32), axis=0)
        least = tl.where(count >= COUNT, least | bit, least)
        bit = tl.where(count == COUNT, 0, bit >> 1)
    return least


@jit()
def _written(
    table_ptr: tl.tensor, positions: tl.tensor, read: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Return what is written for positions, int64: their slots, or the positions if there are no blocks."""
    if BLOCK_SIZE > 0:
        written = slots_at(table_ptr, positions, read, BLOCK_SIZE)
    else:
        written = positions.to(tl.int64)
    return written


@jit(varying=("stride", "table_stride"))
def _largest(
    scores_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_scores_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    AND_LAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROUND: tl.constexpr,
    IS_LAST: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write what is chosen of a tile of a row: scores and positions for the next round, or the slots of the
    last one. The rounds before left `COUNT` scores of each tile, those of the last tile a row sees maybe
    fewer."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place = tl.arange(0, TILE)
    wait(PDL)
    end = tl.load(ends_ptr + row // HEADS).to(tl.int32)
    whole = end // SIZE if AND_LAST else (end + SIZE - 1) // SIZE
    seen = whole
    for _ in tl.static_range(ROUND):  # those that the tiles of the round before chose
        seen = seen // TILE * COUNT + tl.minimum(seen % TILE, COUNT)
    own = seen - tile * TILE
    if IS_LAST or own > 0:
        known = place < own
        at = row * stride + tile * TILE + place
        scores = tl.load(scores_ptr + at, mask=known, other=0.0)
        if ROUND == 0:
            positions = tile * TILE + place
        else:
            positions = tl.load(positions_ptr + at, mask=known, other=0)
        keys = _ordered(scores, known)
        least = tl.zeros((), dtype=tl.uint32)
        if own > COUNT:
            least = _least(keys, COUNT)
        missing = COUNT - tl.sum((keys > least).to(tl.int32), axis=0)
        equal = known & (keys == least)
        chosen = (keys > least) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing))
        rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        if IS_LAST:
            WIDTH: tl.constexpr = COUNT + 1 if AND_LAST else COUNT
            chosen_ptr += row * WIDTH
            table_ptr += row * table_stride
            tl.store(chosen_ptr + rank, _written(table_ptr, positions, chosen, BLOCK_SIZE), mask=chosen)
            after = tl.minimum(own, COUNT)
            if AND_LAST:
                tl.store(chosen_ptr + after, whole.to(tl.int64))
                after += 1
            rest = (place >= after) & (place < WIDTH)
            tl.store(chosen_ptr + place, _written(table_ptr, place * 0, rest, BLOCK_SIZE), mask=rest)
        else:
            into = row * tl.num_programs(1) * COUNT + tile * COUNT + rank
            tl.store(chosen_scores_ptr + into, scores, mask=chosen)
            tl.store(chosen_ptr + into, positions, mask=chosen)


def largest(
    scores_RP: Tensor,
    ends_T: Tensor,
    count: int,
    *,
    size: int = 1,
    and_last: bool = False,
    blocks: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return where the largest scores of rows are, int64 [R, K], in rising order, and after them the first
    position; or the slots of these.

    Args:
        scores_RP: float32, contiguous; those that a row does not see may be anything.
        ends_T: the positions that rows see, of R / T rows each; a score is one of `size` positions.
        count: K, the most that are chosen.
        and_last: a row sees scores of whole positions, and what follows them is chosen besides, so that K is
            one more.
        blocks: the blocks of each row [R, B] and the positions of a block, if slots are to be returned.
    """
    num_rows, num_scores = scores_RP.shape
    device = scores_RP.device
    ends_T = ends_T.contiguous()
    table, block_size = (ends_T, 0) if blocks is None else blocks
    most = max(TILE, triton.next_power_of_2(2 * count))
    tile = min(most, max(256, triton.next_power_of_2(max(num_scores, count + 1))))
    positions = ends_T  # not read in the first round
    is_last = False
    round_idx = 0
    while not is_last:
        num_tiles = triton.cdiv(num_scores, tile)
        is_last = num_tiles == 1
        size_of = (num_rows, count + and_last) if is_last else (num_rows, num_tiles * count)
        chosen = torch.empty(size_of, dtype=torch.int64 if is_last else torch.int32, device=device)
        chosen_scores = scores_RP if is_last else torch.empty(size_of, dtype=torch.float32, device=device)
        _largest[(num_rows, num_tiles)](
            scores_RP,
            positions,
            ends_T,
            table,
            chosen_scores,
            chosen,
            num_scores,
            table.stride(0),
            HEADS=num_rows // len(ends_T),
            SIZE=size,
            AND_LAST=and_last,
            COUNT=count,
            BLOCK_SIZE=block_size,
            ROUND=round_idx,
            IS_LAST=is_last,
            TILE=tile,
            num_warps=min(MOST_WARPS, max(4, tile // (32 * OF_A_THREAD))),
            **pdl_options(device),
        )
        scores_RP = chosen_scores
        positions = chosen
        num_scores = num_tiles * count
        round_idx += 1
    return chosen
