"""The gates of a norm in serving (`models/gated_norm.py`).

Shapes: T rows, D hidden, R the rank of the gates, with zeros after them.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant
from compress.kernels.problem import Phase
from compress.models.ffn import OUTPUT_GATE
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, Rows
from compress.runtime.fusing import COLUMNS_MULTIPLE, fuse


@dataclass(frozen=True)
class NormGate:
    """The linears of the gates of one norm, and the kernel of their activations."""

    gate_in: FusedLinear
    gate_out: FusedLinear
    act_mul: BoundKernel

    @staticmethod
    def of(shape: LayerShape, name: str, weights: Weights, deployment: Deployment) -> "NormGate | None":
        """Return the gates of a norm of a layer by its canonical name, None where it has none. Zeros fill the
        rank up to a number of columns that all kernels of dense linears serve.

        Raises:
            EnvironmentUnfit: no kernel supports one of them.
        """
        if name not in shape.gated_norms:
            return None
        missing = -shape.norm_gate_rank % COLUMNS_MULTIPLE
        gate_in_RD = F.pad(dense(weights[f"{name}.gate_in.weight"]), (0, 0, 0, missing))
        gate_out_DR = F.pad(dense(weights[f"{name}.gate_out.weight"]), (0, missing))

        def linear(module: str, weight_OI: Tensor) -> FusedLinear:
            return fuse((module,), {f"{module}.weight": weight_OI}, deployment)

        return NormGate(
            linear(f"{name}.gate_in", gate_in_RD),
            linear(f"{name}.gate_out", gate_out_DR),
            BoundKernel.of(deployment.kernel_device.problem("act_mul", n=len(gate_out_DR))),
        )

    def rows(self, normed_TD: Tensor, quant: ActivationQuant | None, phase: Phase) -> Rows:
        """Return normed rows times their gates, quantized as the next linear reads them."""
        act_mul = self.act_mul.kernel.fn
        latent_TR = act_mul(self.gate_in(normed_TD, phase), "silu", None, gated=False)
        rows: Rows = act_mul(self.gate_out(latent_TR, phase), OUTPUT_GATE, quant, up_TF=normed_TD)
        return rows

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return self.gate_in.weight_bytes + self.gate_out.weight_bytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.gate_in.report(layer_idx) + self.gate_out.report(layer_idx)
