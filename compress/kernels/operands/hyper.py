"""The weights of a hyper-connection as kernels take them, and the factors for the end of its half-layer.

Shapes: n streams, D hidden, E = n D, M logits, F factors: n, or n + n^2 where streams are mixed.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.kernels.linear.row_product import ColumnBlocks, column_blocks
from compress.models.hyper_connection import Coefficients, HyperConnections


@dataclass(frozen=True)
class HyperWeights:
    """The parameters of the hyper-connection of a half-layer, or of the head: a matrix [M, E], a bias [M] and
    gains, one for each part of the logits, all float32. `norm_eps` is added to the mean square of the
    streams."""

    facts: HyperConnections
    norm_eps: float
    weight_ME: Tensor
    bias_M: Tensor
    gains: Tensor

    @property
    def of_head(self) -> bool:
        """Whether the streams are joined for the head, so that nothing is spread afterwards."""
        return len(self.gains) == 1

    @cached_property
    def blocks(self) -> ColumnBlocks:
        """The matrix as products of single rows read it on a CPU."""
        return column_blocks(self.weight_ME)

    @property
    def weight_bytes(self) -> int:
        """The bytes that a step reads."""
        return sum(each.numel() * each.element_size() for each in (self.weight_ME, self.bias_M, self.gains))


def packed_factors(factors: Coefficients) -> Tensor:
    """Return the factors [T, F] of the end of a half-layer in one tensor."""
    assert factors.post is not None
    if factors.mixing is None:
        return factors.post.contiguous()
    return torch.cat((factors.post, factors.mixing.flatten(-2)), dim=-1)


def unpacked_factors(factors_TF: Tensor, num_streams: int) -> Coefficients:
    """Return what `packed_factors` put into one tensor; the factors of the mixture are not among them."""
    post_Tn = factors_TF[:, :num_streams]
    mixing = factors_TF[:, num_streams:]
    mixing_Tnn = mixing.unflatten(-1, (num_streams, num_streams)) if mixing.shape[1] else None
    return Coefficients(post_Tn, post_Tn, mixing_Tnn)
