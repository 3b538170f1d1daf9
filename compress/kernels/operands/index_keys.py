"""The parts that the kernels of all indexers share: the slots of positions, how many scores there are at
once, and which indexers a program can hold."""

from compress.kernels.compilers.triton import jit, tl, triton, triton_refusal
from compress.kernels.problem import Problem

POSITIONS = 128
"""Positions whose keys a program holds at once."""
MOST_SCORES = 1 << 26
"""Scores that are written before some are chosen: 256 MiB, next to which what tiles choose of them takes as
much at most. What references gather is more (`runtime/kv_cache.py`)."""
MOST_OPERAND_BYTES = 96 * 1024
"""Bytes of the queries and keys of a matrix product, which lie in shared memory: what a block may have on
every GPU from sm_80 on."""


PROGRAMS = 2048
"""Programs that score the keys of all rows, about: some 16 of each multiprocessor of the largest GPUs."""


@jit()
def slots_at(
    table_ptr: tl.tensor, positions: tl.tensor, read: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Return the slots, int64, of positions of the sequence with these blocks, and any where `read` is
    False."""
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=read, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


def programs_of_row(num_rows: int, num_parts: int) -> int:
    """Return how many programs share the parts of the keys of a row, so that parts of a table that no row
    sees cost next to nothing."""
    return min(num_parts, max(1, PROGRAMS // num_rows))


def padded(size: int) -> int:
    """Return the least size of a matrix product that has room for so many rows or columns."""
    return max(16, int(triton.next_power_of_2(size)))


def indexer_refusal(problem: Problem) -> str | None:
    """Return why a program cannot hold the queries of `problem.k` heads of `problem.n` numbers and the keys
    of `POSITIONS` positions, None where it can."""
    return triton_refusal(problem) or operand_refusal(problem.k, problem.n, problem.dtype.itemsize)


def operand_refusal(num_heads: int, width: int, itemsize: int) -> str | None:
    """Return why the queries of so many heads of `width` numbers of `itemsize` bytes, and the keys of
    `POSITIONS` positions, do not fit a program, None where they do."""
    num_bytes = (padded(num_heads) + POSITIONS) * padded(width) * itemsize
    if num_bytes <= MOST_OPERAND_BYTES:
        return None
    return (
        f"holds {MOST_OPERAND_BYTES // 1024} KiB of queries and keys at most, and {num_heads} heads "
        f"of {width} numbers take {num_bytes // 1024}"
    )
