"""The norms around experts that act on latents (`Experts.latent_norms`), in serving: of what the experts
read, and of what each returns, which has weights before its norm.

Shapes: T rows, L latents.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.experts import LATENT_NORM, OUT_NORM
from compress.models.gated_sum import scaled_first
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, packed_bytes
from compress.runtime.gated_sum import of_input, unit_row_norm
from compress.runtime.row_norms import row_norm


@dataclass(frozen=True)
class ExpertNorms:
    """The two norms, the weights [L] of the outputs of experts, float32, and the kernel of both norms."""

    latent: RowNorm
    out: RowNorm
    out_scale_L: Tensor
    kernel: BoundKernel

    @staticmethod
    def of(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> "ExpertNorms | None":
        """Return the norms around the experts of a layer, None where it has none.

        Raises:
            EnvironmentUnfit: no kernel here serves them.
        """
        facts = shape.experts
        if facts is None or not facts.latent_norms:
            return None
        latent = deployment.placed(dense(weights[f"{LATENT_NORM}.weight"]))
        return ExpertNorms(
            row_norm(arch, latent, LATENT_NORM),
            unit_row_norm(facts.latent_size, arch.eps_of(OUT_NORM), deployment),
            of_input(arch, dense(weights[f"{OUT_NORM}.weight"]), deployment),
            BoundKernel.of(deployment.kernel_device.problem("rms_norm", n=facts.latent_size)),
        )

    def latents(self, x_TL: Tensor) -> Tensor:
        """Return normed latents."""
        return self._normed(x_TL, self.latent)

    def outputs(self, y_TL: Tensor) -> Tensor:
        """Return normed outputs of experts, one of each row."""
        return self._normed(scaled_first(y_TL, self.out_scale_L), self.out)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return packed_bytes((self.latent.weight, self.out.weight, self.out_scale_L))

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [self.kernel.report(layer=layer_idx, linear="norms of latents")]

    def _normed(self, x_TL: Tensor, norm: RowNorm) -> Tensor:
        normed_TL: Tensor = self.kernel.kernel.fn(
            x_TL, norm.weight, norm.eps, None, centered=norm.centered, bias=norm.bias
        )
        return normed_TL
