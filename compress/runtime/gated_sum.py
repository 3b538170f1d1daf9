"""Gated sums in serving (`models/gated_sum.py`). The kernel of norms norms the output of a half-layer; the
weights before that norm and the sum after it are elementwise operations of torch. A CUDA graph can capture
these, and the bits of a row do not depend on the other rows of a call.

Shapes: T rows, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.gated_sum import FFN_SCALE, GATES, GatedSums, factors_of, gated_sum, scaled_first
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment


@dataclass(frozen=True)
class GatedSumWeights:
    """The gated sum of a half-layer: the `factors` a and b [D] of the residual and of the normed output, the
    weights [D] that outputs have before their norm, both float32, and that norm."""

    factors: tuple[Tensor, Tensor]
    scale_D: Tensor | None
    norm: RowNorm

    def added(self, y_TD: Tensor, x_TD: Tensor, norm: Callable[[Tensor, RowNorm], Tensor]) -> Tensor:
        """Return the residual after a half-layer from its output y and the residual x before it; `norm` is
        that of rows."""
        scaled_TD = y_TD if self.scale_D is None else scaled_first(y_TD, self.scale_D)
        return gated_sum(x_TD, norm(scaled_TD, self.norm), self.factors)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads."""
        return sum(each.nbytes for each in (*self.factors, self.scale_D) if each is not None)


def gated_sum_weights(
    arch: Arch, facts: GatedSums, weights: Weights, name: str, deployment: Deployment
) -> GatedSumWeights | None:
    """Return the gated sum by its canonical name, None where there is none."""
    gates_D = weights.get(f"{name}.{GATES}")
    if gates_D is None:
        return None
    scale_D = weights.get(f"{name}.{FFN_SCALE}")
    size = arch.hidden_size
    return GatedSumWeights(
        factors_of(dense(gates_D).to(deployment.device), facts.temperature),
        None if scale_D is None else of_input(arch, dense(scale_D), deployment),
        unit_row_norm(size, arch.eps_of(f"{name.removesuffix('_hyper')}_post_norm"), deployment),
    )


def of_input(arch: Arch, weight_D: Tensor, deployment: Deployment) -> Tensor:
    """Return the weights that rows have before a norm, float32, with their offset."""
    return weight_D.to(device=deployment.device, dtype=torch.float32) + arch.norm_offset


def unit_row_norm(size: int, eps: float, deployment: Deployment) -> RowNorm:
    """Return a norm of rows without a weight."""
    return RowNorm(torch.ones(size, dtype=deployment.dtype, device=deployment.device), eps)
