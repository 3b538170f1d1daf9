"""Lightning attention in serving (`models/lightning.py`), between its linears: a kernel of Mamba-2 mixers
computes the recurrence, one of norms the norm of its outputs, and one of activations the gates.

The kernel of mixers takes a convolution, gates and steps of time. Here the convolution has one position with
weights of 1, all gates are numbers whose silu is 1, and all steps are 1, so that the outputs are those of the
recurrence, to the rounding of float32.

Shapes: T rows, H heads, Z outputs of all heads, F = 3 Z numbers of q, k and v.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import MambaWeights
from compress.kernels.operands.rows import RowNorm
from compress.models.arch import Arch
from compress.models.ffn import OUTPUT_GATE
from compress.models.lightning import LIGHTNING_NORM, Lightning
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, Rows
from compress.runtime.latent_linears import BoundNorm

if TYPE_CHECKING:
    from compress.runtime.layer_attention import Projected

_OPEN_GATE = 1.2784645427610738
"""The number whose silu is 1."""
_UNIT_STEP = math.log(math.e - 1)
"""The number whose softplus is 1."""


@dataclass(frozen=True)
class LightningRows:
    """The widths of lightning attention, the norm of its outputs, and its last linear."""

    facts: Lightning
    norm: BoundNorm
    linear: FusedLinear

    @staticmethod
    def of(
        facts: Lightning, linear: FusedLinear | None, weights: Weights, arch: Arch, deployment: Deployment
    ) -> "LightningRows":
        """Load the norm of the outputs, which `linear` reads.

        Raises:
            EnvironmentUnfit: no kernel here serves it.
        """
        assert linear is not None
        weight_Z = deployment.placed(dense(weights[f"{LIGHTNING_NORM}.weight"]))
        problem = deployment.kernel_device.problem("rms_norm", n=len(weight_Z))
        norm = BoundNorm(RowNorm(weight_Z, arch.eps_of(LIGHTNING_NORM)), BoundKernel.of(problem))
        return LightningRows(facts, norm, linear)

    def gated(
        self,
        projected: "Projected",
        recurred: Callable[["Projected"], Tensor],
        act_mul: Callable[..., Any],
    ) -> Rows:
        """Return what the last linear reads, from q, k, v and gates [T, 4 Z] of the rows of a pass.
        `recurred` computes a Mamba-2 mixer of its rows, and `act_mul` gates."""
        size = self.facts.value_size
        inputs_TF, gate_TZ = projected.qkv_TF.split([3 * size, size], dim=1)
        open_TZ = inputs_TF.new_ones(len(inputs_TF), size)
        steps_TH = inputs_TF.new_zeros(len(inputs_TF), self.facts.num_heads)
        rows_TF = torch.cat((inputs_TF, open_TZ, steps_TH), dim=1)
        normed_TZ = self.norm(recurred(replace(projected, qkv_TF=rows_TF)))
        rows: Rows = act_mul(gate_TZ, OUTPUT_GATE, self.linear.quant, up_TF=normed_TZ)
        return rows

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of the weight of the norm."""
        return self.norm.norm.weight.nbytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [self.norm.kernel.report(layer=layer_idx, linear=LIGHTNING_NORM)]


def as_mixer(facts: Lightning, deployment: Deployment) -> MambaWeights:
    """Return the parameters of the Mamba-2 mixer that computes the recurrence of lightning attention."""
    on_device: dict[str, Any] = {"dtype": torch.float32, "device": deployment.device}
    heads = (facts.num_heads,)
    return MambaWeights(
        conv_FW=torch.ones(facts.num_channels, facts.kernel_size, **on_device),
        conv_bias_F=None,
        decay_rate_H=-torch.tensor(facts.slopes, **on_device),
        dt_bias_H=torch.full(heads, _UNIT_STEP, **on_device),
        skip_H=torch.zeros(heads, **on_device),
        norm_Z=None,
        norm_groups=facts.num_heads,
        norm_eps=0.0,
        gate_factor=_OPEN_GATE,
    )
