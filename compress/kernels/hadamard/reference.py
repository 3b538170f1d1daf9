"""Reference of the Hadamard transform of heads: y = x H / sqrt(C), for a power of two C, as QuaRot applies it
to keys, queries and values (arXiv 2404.00456, section 4).

    H_1 = [1],  H_2n = [[H_n, H_n], [H_n, -H_n]]

The matrix divided by sqrt(C) is symmetric and orthonormal: the transform is its own inverse, and products of
a transformed query and a transformed key are those of the plain ones. A number far larger than the rest of
its head is spread over all of them, so a scale a head serves four-bit codes better.

Sums are float32, and the order of additions is part of the definition: first the halves of a head, then
neighbours, log2(C / 2) times; the quotient is rounded once to the dtype of x. It is not folded into weights:
those of q and k are read before rope, and codes would have to be chosen again.
"""

import torch
from torch import Tensor

from compress.kernels.select import Kernel, anything, register


def hadamard(x: Tensor) -> Tensor:
    """Return the transform of the last axis of x, in its dtype."""
    size = x.shape[-1]
    assert size & (size - 1) == 0, f"{size} is no power of two"
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    halves = torch.stack((first + second, first - second), dim=-2)
    for _ in range(size.bit_length() - 2):
        even = halves[..., 0::2]
        odd = halves[..., 1::2]
        halves = torch.cat((even + odd, even - odd), dim=-1)
    return (halves.flatten(-2) * size**-0.5).to(x.dtype)


register(Kernel("hadamard", "reference", min_sm=0, priority=0, supports=anything, fn=hadamard))
