"""The module of a Mamba-1 mixer (`mamba1.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, V channels, K numbers of the state of a channel, R rank of dt.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.linear import Linear
from compress.models.mamba1 import NORMS, Mamba1, selective_scan
from compress.models.norms import Norm, UnitNorm
from compress.models.recurrence import RecurrentState, convolved, last_inputs
from compress.models.recurrent_mixer import RecurrentMixer, convolution_of


class Mamba1Mixer(RecurrentMixer):
    """A selective state space model with its linears."""

    x: nn.Linear
    gate: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, mamba: Mamba1) -> None:
        super().__init__(arch, shape)
        self.mamba = mamba
        self.conv = convolution_of(mamba, bias=mamba.conv_bias)
        self.x_proj = Linear(mamba.value_size, sum(mamba.inner_sizes), bias=False)
        self.dt_proj = Linear(mamba.rank, mamba.value_size, bias=True)
        rates_K = torch.arange(1, mamba.key_dim + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(rates_K.log().repeat(mamba.value_size, 1))
        self.D = nn.Parameter(torch.ones(mamba.value_size))
        if mamba.normed:
            for name, size in zip(NORMS, mamba.inner_sizes, strict=True):
                eps = arch.eps_of(f"mamba1.{name}")
                own = UnitNorm(eps, centered=False) if mamba.unit_norms else Norm(size, eps)
                self.add_module(name, own)

    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the gated outputs of all channels, and the state after the last position."""
        inputs_BSV = self.x(x_BSD)
        past_BWV = None if past is None else past.inputs_BWF
        mixed_BSV = convolved(inputs_BSV, self.conv.weight.squeeze(1), past_BWV, self.conv.bias)
        dt_BSV, b_BSK, c_BSK = self._selected(mixed_BSV)
        x_BSV = mixed_BSV.to(torch.float32)
        past_BVK = None if past is None or past.heads_BHKV is None else past.heads_BHKV.squeeze(1).mT
        rate_VK = -self.A_log.to(torch.float32).exp()
        out_BSV, state_BVK = selective_scan(x_BSV, dt_BSV, rate_VK, b_BSK, c_BSK, past_BVK)
        out_BSV = out_BSV + self.D.to(torch.float32) * x_BSV
        gated_BSV = out_BSV * F.silu(self.gate(x_BSD).to(torch.float32))
        kept_BWV = last_inputs(inputs_BSV, past_BWV, self.mamba.kernel_size)
        return gated_BSV.to(x_BSD.dtype), RecurrentState(kept_BWV, state_BVK.mT.unsqueeze(1))

    def _selected(self, mixed_BSV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt [B, S, V], float32, B and C [B, S, K]."""
        parts = self.x_proj(mixed_BSV).split(list(self.mamba.inner_sizes), dim=-1)
        if self.mamba.normed:
            parts = [self.get_submodule(name)(part) for name, part in zip(NORMS, parts, strict=True)]
        d_BSR, b_BSK, c_BSK = parts
        dt_BSV = F.linear(d_BSR, self.dt_proj.weight.to(d_BSR.dtype)).to(torch.float32)
        return F.softplus(dt_BSV + self.dt_proj.bias.to(torch.float32)), b_BSK, c_BSK
