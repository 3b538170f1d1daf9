"""Gated residuals in serving (`models/gated_residual.py`): a kernel for each phase reads the streams before a
half-layer, and before the head. The output of a half-layer is added to the streams by the kernel of
hyper-connections.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of the gates.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import PHASES, Phase
from compress.kernels.select import select
from compress.models.arch import Arch
from compress.models.gated_residual import GatedResiduals
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, packed_bytes


@dataclass(frozen=True)
class GatedResidualWeights:
    """The gated residual of a half-layer, or that of the head, by its canonical name: its kernels, and the
    norm of the streams, whose weights [n, D] are float32."""

    name: str
    norm: RowNorm
    kernels: dict[Phase, BoundKernel]

    @property
    def weight_bytes(self) -> int:
        """The bytes that a step reads."""
        return packed_bytes(self.kernels["decode"].packed) + self.norm.weight.nbytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [self.kernels[phase].report(layer=layer_idx, linear=self.name) for phase in PHASES]

    def enter(self, streams_TE: Tensor, phase: Phase) -> tuple[Tensor, Tensor | None]:
        """Return the mixture of the streams [T, D], and the factors by which the output of the half-layer is
        added to each stream, float32 [T, n]; None for the head."""
        bound = self.kernels[phase]
        mixed_TD, factors_Tn = bound.kernel.fn(streams_TE, bound.packed, self.norm)
        return mixed_TD, factors_Tn


def gated_residual_weights(
    arch: Arch, facts: GatedResiduals, weights: Weights, name: str, deployment: Deployment
) -> GatedResidualWeights:
    """Return the gated residual by its canonical name.

    Raises:
        EnvironmentUnfit: no kernel serves it.
    """
    norm_E = dense(weights[f"{name}.norm.weight"]).to(device=deployment.device, dtype=torch.float32)
    leaves = [each for each in ("down", "up", "inject") if f"{name}.{each}.weight" in weights]
    matrices = [weights[f"{name}.{each}.weight"] for each in leaves]
    packed: dict[Any, Any] = {}
    kernels: dict[Phase, BoundKernel] = {}
    for phase in PHASES:
        problem = deployment.kernel_device.problem("gated_mix", n=arch.hidden_size, k=facts.rank, phase=phase)
        kernel = select(problem)
        assert kernel.repack is not None, f"kernel {kernel.name} of gated residuals has no repack"
        if kernel.repack not in packed:
            packed[kernel.repack] = kernel.repack(
                matrices, dtype=deployment.dtype, device=deployment.device, gated=False
            )
        kernels[phase] = BoundKernel(kernel, problem, packed[kernel.repack])
    norm = RowNorm((norm_E + arch.norm_offset).unflatten(0, (facts.num_streams, -1)), arch.norm_eps)
    return GatedResidualWeights(name, norm, kernels)
