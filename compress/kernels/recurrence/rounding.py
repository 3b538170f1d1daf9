"""Rounding of operands to TF32, which Triton kernels of recurrences multiply in."""

from compress.kernels.compilers.triton import jit, tl


@jit()
def rounded(x: tl.tensor, TF32: tl.constexpr) -> tl.tensor:
    """Round numbers to the nearest of TF32, to which tensor cores would cut them off."""
    if TF32:
        nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x)
    return x
