"""Common parts of the Triton kernels of Mamba-1 mixers."""

from compress.kernels.compilers.triton import jit, tl


@jit()
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)), exact where exp(x) is little: divided by what 1 + exp(x) has lost of it."""
    small = tl.exp(tl.minimum(x, 20.0))
    above = 1 + small
    lost = tl.where(above == 1, 1.0, small / tl.where(above == 1, 1.0, above - 1))
    return tl.where(x > 20.0, x, tl.where(above == 1, small, tl.log(above) * lost))


@jit()
def save_if(is_wanted: tl.tensor, saved_at: tl.tensor, state: tl.tensor, real: tl.tensor) -> None:
    """Save a state if it is wanted; in a branch, since threads exchange numbers before they store any."""
    if is_wanted:
        tl.store(saved_at, state, mask=real)
