"""The steps of a head before it is stored: the angles of its position, the moments of its norm, its turn.

Shapes: C head dimension.
"""

from compress.kernels.compilers.triton import jit, tl


@jit()
def angles(
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    position: tl.tensor,
    columns: tl.tensor,
    half: tl.tensor,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a position's rows of the tables as halves: cos and cos, sin and sin."""
    at = position * C + columns
    cos_first = tl.load(cos_ptr + at, mask=half, other=0.0)
    cos_second = tl.load(cos_ptr + at + C // 2, mask=half, other=0.0)
    return (
        cos_first,
        cos_second,
        tl.load(sin_ptr + at, mask=half, other=0.0),
        tl.load(sin_ptr + at + C // 2, mask=half, other=0.0),
    )


@jit()
def moments(
    row_ptr: tl.tensor, SIZE: tl.constexpr, CENTERED: tl.constexpr, SPAN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the mean of SIZE numbers, 0 unless `CENTERED`, and the mean of the squares around it."""
    columns = tl.arange(0, SPAN)
    mean = 0.0
    if CENTERED:
        sums = tl.zeros([SPAN], tl.float32)
        for start in tl.range(0, SIZE, SPAN):
            sums += tl.load(row_ptr + start + columns, mask=start + columns < SIZE, other=0.0).to(tl.float32)
        mean = tl.sum(sums, axis=0) / SIZE
    squares = tl.zeros([SPAN], tl.float32)
    for start in tl.range(0, SIZE, SPAN):
        real = start + columns < SIZE
        x = tl.load(row_ptr + start + columns, mask=real, other=0.0).to(tl.float32)
        if CENTERED:
            x = tl.where(real, x - mean, 0.0)
        squares += x * x
    return mean, tl.sum(squares, axis=0) / SIZE


@jit()
def turned(
    x: tl.tensor,
    y: tl.tensor,
    cos_first: tl.tensor,
    cos_second: tl.tensor,
    sin_first: tl.tensor,
    sin_second: tl.tensor,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the halves of heads turned by the angles of `angles`, products and sums rounded to `dtype`."""
    first = (x * cos_first.to(tl.float32)).to(dtype).to(tl.float32) - (y * sin_first.to(tl.float32)).to(
        dtype
    ).to(tl.float32)
    second = (y * cos_second.to(tl.float32)).to(dtype).to(tl.float32) + (x * sin_second.to(tl.float32)).to(
        dtype
    ).to(tl.float32)
    return first.to(dtype), second.to(dtype)
