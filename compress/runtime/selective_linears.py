"""The parameters of a Mamba-1 mixer in serving, other than the linears that schemes quantize.

Shapes: T rows, V channels and W positions of the convolution, K numbers of the state of a channel, R rank of
dt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.operands.rows import RowNorm
from compress.kernels.operands.selective import ScanRows, ScanWeights
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.mamba1 import NORMS, Mamba1
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear, packed_bytes
from compress.runtime.fusing import COLUMNS_MULTIPLE, fuse_padded
from compress.runtime.latent_linears import BoundNorm

if TYPE_CHECKING:
    from compress.runtime.layer_attention import Projected


@dataclass(frozen=True)
class SelectiveLinears:
    """The convolution of a mixer, the linears of dt, B and C, which stay dense, with their norms, and the
    parameters of the recurrence."""

    facts: Mamba1
    conv_VW: Tensor
    conv_bias_V: Tensor | None
    x_proj: FusedLinear
    norms: tuple[BoundNorm, ...]
    dt_proj: FusedLinear
    weights: ScanWeights

    @staticmethod
    def of(facts: Mamba1, weights: Weights, arch: Arch, deployment: Deployment) -> "SelectiveLinears":
        """Load the convolution, the linears, the norms and the recurrence of a mixer."""

        def in_float32(name: str) -> Tensor:
            return dense(weights[f"mamba1.{name}"]).to(device=deployment.device, dtype=torch.float32)

        def norm(name: str, size: int) -> BoundNorm:
            ones = torch.ones(size, dtype=deployment.dtype)
            weight = deployment.placed(ones if facts.unit_norms else dense(weights[f"mamba1.{name}.weight"]))
            problem = deployment.kernel_device.problem("rms_norm", n=len(weight))
            return BoundNorm(RowNorm(weight, arch.eps_of(f"mamba1.{name}")), BoundKernel.of(problem))

        dt_VR = dense(weights["mamba1.dt_proj.weight"])
        return SelectiveLinears(
            facts,
            in_float32("conv.weight").squeeze(1).contiguous(),
            in_float32("conv.bias") if facts.conv_bias else None,
            fuse_padded("mamba1.x_proj", dense(weights["mamba1.x_proj.weight"]), deployment),
            tuple(map(norm, NORMS, facts.inner_sizes)) if facts.normed else (),
            fuse_padded("mamba1.dt_proj", F.pad(dt_VR, (0, -facts.rank % COLUMNS_MULTIPLE)), deployment),
            ScanWeights(-in_float32("A_log").exp(), in_float32("dt_proj.bias"), in_float32("D")),
        )

    def scanned(
        self, projected: "Projected", convolve: Callable[["Projected"], Tensor], phase: Phase
    ) -> "Projected":
        """Return what the recurrence reads of the rows of x and gates [T, 2 V] of a pass. `convolve` computes
        the convolution of rows [T, V] and keeps the last of them."""
        size = self.facts.value_size
        inputs_TV, gate_TV = projected.qkv_TF.split(size, dim=1)
        # In float32, so that the sum is rounded once, after its bias.
        sums_TV = convolve(replace(projected, qkv_TF=inputs_TV.to(torch.float32), conv_FW=self.conv_VW))
        if self.conv_bias_V is not None:
            sums_TV = sums_TV + self.conv_bias_V
        x_TV = in_whole_vectors(F.silu, sums_TV.to(inputs_TV.dtype)).contiguous()
        dt_TV, bc_TK = self._selected(x_TV, phase)
        return replace(projected, qkv_TF=x_TV, scan=ScanRows(x_TV, gate_TV, dt_TV, bc_TK))

    def _selected(self, x_TV: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Return dt without its bias [T, V], and B and C side by side [T, 2 K]."""
        sizes = self.facts.inner_sizes
        parts = self.x_proj(x_TV, phase)[:, : sum(sizes)].split(list(sizes), dim=1)
        if self.norms:
            parts = tuple(norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True))
        d_TR, b_TK, c_TK = parts
        d_TR = F.pad(d_TR, (0, -self.facts.rank % COLUMNS_MULTIPLE))
        return self.dt_proj(d_TR.contiguous(), phase)[:, : self.facts.value_size], torch.cat((b_TK, c_TK), 1)

    @property
    def _linears(self) -> tuple[FusedLinear, ...]:
        return self.x_proj, self.dt_proj

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads, without states."""
        own = packed_bytes((self.conv_VW, self.conv_bias_V, self.weights))
        return sum(each.weight_bytes for each in self._linears) + own

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self._linears for row in each.report(layer_idx)]
