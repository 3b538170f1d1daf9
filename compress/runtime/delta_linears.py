"""The parameters of a gated delta net in serving, other than the linears that schemes quantize.

Shapes: T rows, F channels and W positions of the convolution, H value heads, D decays (`DeltaWeights`), R
latents of decays or of gates, Z outputs of all heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import DeltaWeights
from compress.kernels.problem import Phase
from compress.models.delta_net import DeltaNet
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import COLUMNS_MULTIPLE, fuse_padded


@dataclass(frozen=True)
class DeltaLinears:
    """The linears of beta, decays and gates, which stay dense, and the parameters of the recurrence. `first`
    reads the stream: its outputs are those of beta and decay, or with a `rank` those of beta and of two
    latents, which `second` reads."""

    facts: DeltaNet
    first: FusedLinear
    second: FusedLinear | None
    weights: DeltaWeights

    @staticmethod
    def of(facts: DeltaNet, weights: Weights, norm_eps: float, deployment: Deployment) -> "DeltaLinears":
        """Load them."""

        def rows(*names: str) -> Tensor:
            return torch.cat([dense(weights[f"delta.{name}.weight"]) for name in names])

        def in_float32(name: str) -> Tensor:
            return dense(weights[name]).to(device=deployment.device, dtype=torch.float32)

        names = ("beta", "decay_down", "gate_down") if facts.rank else ("beta", "decay")
        first = rows(*names)
        second = None
        if facts.rank:
            first = F.pad(first, (0, 0, 0, -len(first) % COLUMNS_MULTIPLE))
            second = _of_latents(len(first), facts.num_heads, rows("decay"), rows("gate"))
        return DeltaLinears(
            facts,
            fuse_padded("delta.beta_decay", first, deployment),
            None if second is None else fuse_padded("delta.latents", second, deployment),
            DeltaWeights(
                deployment.placed(rows(*facts.convolutions)).squeeze(1).contiguous(),
                -in_float32("delta.A_log").flatten().exp(),
                in_float32("delta.dt_bias"),
                deployment.placed(dense(weights["delta.norm.weight"])),
                norm_eps,
                facts.beta_factor,
            ),
        )

    def of_rows(self, rows_TD: Tensor, phase: Phase) -> tuple[Tensor, Tensor | None]:
        """Return beta and decays of normed rows, float32 [T, H + D], and gates, float32 [T, Z], where latents
        are what their linear reads."""
        num_first = self.facts.num_heads + self.facts.num_decays
        if self.second is None:
            return self.first(rows_TD, phase, out_dtype=torch.float32)[:, :num_first], None
        out_TF = self.second(self.first(rows_TD, phase), phase, out_dtype=torch.float32)
        return out_TF[:, :num_first], out_TF[:, num_first : num_first + self.facts.value_size]

    @property
    def _linears(self) -> tuple[FusedLinear, ...]:
        return tuple(each for each in (self.first, self.second) if each is not None)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads, without states."""
        parts = (self.weights.conv_FW, self.weights.norm_V)
        return sum(each.weight_bytes for each in self._linears) + sum(each.nbytes for each in parts)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self._linears for row in each.report(layer_idx)]


def _of_latents(num_first: int, num_heads: int, decay_DR: Tensor, gate_ZR: Tensor) -> Tensor:
    """Return the weights of one linear of the `num_first` outputs of the first, rounded to the dtype of the
    model: beta as it arrives, decays and gates each of their own latents, and nothing of what the rows of
    zeros at the end give."""
    together = torch.block_diag(decay_DR.new_ones(num_heads).diag(), decay_DR, gate_ZR)
    return F.pad(together, (0, num_first - together.shape[1]))
