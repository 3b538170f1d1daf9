"""The matrices of a gated residual as kernels take them (`models/gated_residual.py`).

Shapes: n streams, D hidden, E = n D, R the rank of the gates, F = R + n, or R for the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.weights import dense
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class GatedMatrices:
    """W_down with the rows of W_q after its own, and W_up, in the dtype of the model."""

    down_FE: Tensor
    up_ER: Tensor

    @property
    def num_factors(self) -> int:
        """The rows of W_q: the streams, or 0 for the head."""
        return self.down_FE.shape[0] - self.up_ER.shape[1]


def gated_matrices(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> GatedMatrices:
    """Return the matrices of W_down, W_up and, unless they are those of the head, W_q."""
    assert not gated
    down, up, *inject = (dense(each).to(device=device, dtype=dtype) for each in weights)
    return GatedMatrices(torch.cat((down, *inject)), up.contiguous())
