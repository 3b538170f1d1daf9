"""The norms before the last linears of a layer's halves (Sub-LN, arXiv 2210.06423), in serving.

Shapes: T rows, F channels of a linear's input.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, Rows, packed_bytes
from compress.runtime.row_norms import row_norm


@dataclass(frozen=True)
class SubNorm:
    """One such norm, its kernel, and the linear that reads its output."""

    name: str
    norm: RowNorm
    linear: FusedLinear
    kernel: BoundKernel

    @staticmethod
    def of(
        arch: Arch, name: str, linear: FusedLinear | None, weights: Weights, deployment: Deployment
    ) -> "SubNorm | None":
        """Return the norm with this canonical name of a layer, None where it has none.

        Raises:
            EnvironmentUnfit: no kernel here serves it.
        """
        stored = weights.get(f"{name}.weight")
        if stored is None:
            return None
        assert linear is not None
        weight_F = deployment.placed(dense(stored))
        kernel = BoundKernel.of(deployment.kernel_device.problem("rms_norm", n=len(weight_F)))
        return SubNorm(name, row_norm(arch, weight_F), linear, kernel)

    def rows(self, x_TF: Tensor) -> Rows:
        """Return normed rows, quantized as the linear reads them."""
        norm = self.norm
        rows: Rows = self.kernel.kernel.fn(
            x_TF, norm.weight, norm.eps, self.linear.quant, centered=norm.centered, bias=norm.bias
        )
        return rows

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of its weight."""
        return packed_bytes(self.norm.weight)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [self.kernel.report(layer=layer_idx, linear=self.name)]
