"""Sums with the normed residual in serving (`models/normed_sum.py`). A half-layer's kernel norms the residual
for the linears, which may read it quantized; the kernel of norms computes it once more for the sum, which is
an elementwise operation of torch. A CUDA graph can capture both, and the bits of a row do not depend on the
other rows of a call.

Shapes: T rows, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.normed_sum import NormedSums, normed_sum
from compress.models.recurrences import PREFIXES
from compress.models.weights import Weights
from compress.runtime.deployment import Deployment
from compress.runtime.row_norms import stream_norm


@dataclass(frozen=True)
class NormedSumWeights:
    """The sum of a half-layer with the normed residual: the `factors` a and b of the residual and of the
    output, and the norm of what the half-layer reads."""

    factors: tuple[float, float]
    norm: RowNorm

    def added(self, y_TD: Tensor, x_TD: Tensor, norm: Callable[[Tensor, RowNorm], Tensor]) -> Tensor:
        """Return the residual after a half-layer from its output y and the residual x before it; `norm` is
        that of rows."""
        return normed_sum(norm(x_TD, self.norm), y_TD, self.factors)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads."""
        return self.norm.weight.nbytes


def normed_sum_weights(
    arch: Arch, facts: NormedSums, weights: Weights, name: str, deployment: Deployment
) -> NormedSumWeights | None:
    """Return the sum of a half-layer by its canonical name, `attn_hyper` or `ffn_hyper`, of a layer with
    these weights; None for the head, which has none."""
    norm = f"{name.removesuffix('_hyper')}_norm"
    if f"{norm}.weight" not in weights:
        return None
    recurs = any(each.startswith(PREFIXES) for each in weights)
    factors = facts.factors("ffn" if name == "ffn_hyper" else "mixer", recurs=recurs)
    return NormedSumWeights(factors, stream_norm(arch, weights, norm, deployment))
