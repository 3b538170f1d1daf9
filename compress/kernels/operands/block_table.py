"""The lookup of a block table in Triton kernels: from keys to the block of the cache that holds them."""

from compress.kernels.compilers.triton import jit, tl


@jit()
def block_of(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end_key: tl.tensor,
    context_len: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the block of the keys [start, start + TILE), or the block of each key where they lie in
    several; 0 from `end_key`, or `context_len`, on."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end_key, other=0)
    else:
        keys = start + tl.arange(0, TILE)
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < context_len, other=0)
