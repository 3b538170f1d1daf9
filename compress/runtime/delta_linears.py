"""The parameters of a gated delta net in serving, other than the linears that schemes quantize."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import DeltaWeights
from compress.kernels.problem import Phase
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse_padded


@dataclass(frozen=True)
class DeltaLinears:
    """The linear of beta and decay, which stays dense, and the parameters of the recurrence."""

    beta_decay: FusedLinear
    weights: DeltaWeights

    @staticmethod
    def of(
        weights: Weights, norm_eps: float, deployment: Deployment, *, beta_factor: float = 1.0
    ) -> "DeltaLinears":
        """Load them."""
        rows = torch.cat([dense(weights[f"delta.{name}.weight"]) for name in ("beta", "decay")])

        def in_float32(name: str) -> Tensor:
            return dense(weights[name]).to(device=deployment.device, dtype=torch.float32)

        return DeltaLinears(
            fuse_padded("delta.beta_decay", rows, deployment),
            DeltaWeights(
                deployment.placed(dense(weights["delta.conv.weight"])).squeeze(1).contiguous(),
                -in_float32("delta.A_log").exp(),
                in_float32("delta.dt_bias"),
                deployment.placed(dense(weights["delta.norm.weight"])),
                norm_eps,
                beta_factor,
            ),
        )

    def of_rows(self, rows_TD: Tensor, phase: Phase) -> Tensor:
        """Return beta and decay of normed rows, float32 [T, 2 H]."""
        num_heads = len(self.weights.dt_bias_H)
        return self.beta_decay(rows_TD, phase, out_dtype=torch.float32)[:, : 2 * num_heads]

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads, without states."""
        parts = (self.weights.conv_FW, self.weights.norm_V)
        return self.beta_decay.weight_bytes + sum(each.nbytes for each in parts)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.beta_decay.report(layer_idx)
