"""The learned low-rank residual around attention (LAuReL, arXiv 2411.07501).

    x' = (x + attention(h) + h + norm(right(left(h)))) / sqrt(2),   h = attn_norm(x)

Shapes: D hidden, R the rank.
"""

import math

from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.linear import Linear
from compress.models.norms import norm_of

LAUREL_LINEARS = ("laurel.left", "laurel.right")
"""The linears of a layer; no scheme is theirs."""


class Laurel(nn.Module):
    """The linears of the residual, and the norm of what they compute."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.left = Linear(arch.hidden_size, arch.laurel_rank, bias=False)
        self.right = Linear(arch.laurel_rank, arch.hidden_size, bias=False)
        self.norm = norm_of(arch, arch.hidden_size)

    def forward(self, x_D: Tensor, normed_D: Tensor) -> Tensor:
        """Return the stream from the one after attention, and from what attention reads."""
        return (x_D + (normed_D + self.norm(self.right(self.left(normed_D))))) / math.sqrt(2)
