"""The parameters of a gated delta net in serving, other than the linears that schemes quantize.

Shapes: T rows, F channels and W positions of the convolution, H value heads, D decays (`DeltaWeights`), Z
outputs of all heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import DeltaWeights
from compress.kernels.problem import Phase
from compress.models.delta_net import DeltaNet
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse_padded


@dataclass(frozen=True)
class DeltaLinears:
    """The linears of beta, decays and gates, which stay dense, and the parameters of the recurrence. `first`
    reads the stream: its outputs are those of beta and decay, or with a `rank` those of beta and the latents,
    which `decay` and `gate` read."""

    facts: DeltaNet
    first: FusedLinear
    decay: FusedLinear | None
    gate: FusedLinear | None
    weights: DeltaWeights

    @staticmethod
    def of(facts: DeltaNet, weights: Weights, norm_eps: float, deployment: Deployment) -> "DeltaLinears":
        """Load them."""

        def rows(*names: str) -> Tensor:
            return torch.cat([dense(weights[f"delta.{name}.weight"]) for name in names])

        def in_float32(name: str) -> Tensor:
            return dense(weights[name]).to(device=deployment.device, dtype=torch.float32)

        def of_latent(name: str) -> FusedLinear | None:
            return fuse_padded(f"delta.{name}", rows(name), deployment) if facts.rank else None

        names = ("beta", "decay_down", "gate_down") if facts.rank else ("beta", "decay")
        convolutions = ("q_conv", "k_conv", "v_conv") if facts.rank else ("conv",)
        return DeltaLinears(
            facts,
            fuse_padded("delta.beta_decay", rows(*names), deployment),
            of_latent("decay"),
            of_latent("gate"),
            DeltaWeights(
                deployment.placed(rows(*convolutions)).squeeze(1).contiguous(),
                -in_float32("delta.A_log").flatten().exp(),
                in_float32("delta.dt_bias"),
                deployment.placed(dense(weights["delta.norm.weight"])),
                norm_eps,
                facts.beta_factor,
            ),
        )

    def of_rows(self, rows_TD: Tensor, phase: Phase) -> tuple[Tensor, Tensor | None]:
        """Return beta and decays of normed rows, float32 [T, H + D], and gates [T, Z] where latents are what
        their linear reads."""
        facts = self.facts
        first = self.first(rows_TD, phase, out_dtype=torch.float32)
        if self.decay is None or self.gate is None:
            return first[:, : facts.num_heads + facts.num_decays], None
        ends = facts.num_heads, facts.num_heads + facts.rank, facts.num_heads + 2 * facts.rank
        beta_TH, *latents, _ = first.tensor_split(ends, dim=1)
        of_decay, of_gate = (each.to(rows_TD.dtype).contiguous() for each in latents)
        decay_TD = self.decay(of_decay, phase, out_dtype=torch.float32)[:, : facts.num_decays]
        gate_TZ = self.gate(of_gate, phase)[:, : facts.value_size]
        return torch.cat((beta_TH, decay_TD), dim=1), gate_TZ

    @property
    def _linears(self) -> tuple[FusedLinear, ...]:
        return tuple(each for each in (self.first, self.decay, self.gate) if each is not None)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads, without states."""
        parts = (self.weights.conv_FW, self.weights.norm_V)
        return sum(each.weight_bytes for each in self._linears) + sum(each.nbytes for each in parts)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self._linears for row in each.report(layer_idx)]
