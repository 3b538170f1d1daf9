"""The Hadamard transform of heads for Triton kernels, in registers: sums of float32 in the order of
`hadamard/reference.py`, and so its bits.

A head comes as its two halves. Each step adds and subtracts neighbours and puts sums before differences, so
all steps move numbers alike.
"""

from compress.kernels.compilers.triton import jit, tl


@jit()
def transformed_halves(
    first: tl.tensor, second: tl.tensor, C: tl.constexpr, STEPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the halves of the transformed heads, float32 [h, C / 2]; `STEPS` is log2(C / 2)."""
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    return _transformed(x + y, STEPS) * (C**-0.5), _transformed(x - y, STEPS) * (C**-0.5)


@jit()
def _transformed(x: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), [x.shape[0], x.shape[1]])
    return x
