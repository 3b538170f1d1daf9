"""The module of a Mamba-2 mixer (`mamba2.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, H heads, K state size, V dimension of a head, F outputs of linears.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.mamba2 import Mamba2, state_space_scan
from compress.models.norms import Norm
from compress.models.recurrence import RecurrentState, convolved, last_inputs
from compress.models.recurrent_mixer import RecurrentMixer, convolution_of


class Mamba2Mixer(RecurrentMixer):
    """A state space model with its linears."""

    C: nn.Linear
    B: nn.Linear
    x: nn.Linear
    gate: nn.Linear
    dt: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, mamba: Mamba2) -> None:
        super().__init__(arch, shape)
        self.mamba = mamba
        self.conv = convolution_of(mamba, bias=mamba.conv_bias)
        self.dt_bias = nn.Parameter(torch.ones(mamba.num_heads))
        self.A_log = nn.Parameter(torch.zeros(mamba.num_heads))
        self.D = nn.Parameter(torch.ones(mamba.num_heads))
        if mamba.normed:
            self.norm = Norm(mamba.value_size, arch.eps_of("mamba.norm"), heads=mamba.num_key_heads)

    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of all heads, gated and then normed if they are."""
        out_BSF, state = self._scanned(x_BSD, past)
        gated_BSF = out_BSF * F.silu(self.gate(x_BSD).to(torch.float32))
        if not self.mamba.normed:
            return gated_BSF.to(x_BSD.dtype), state
        groups = self.mamba.num_key_heads
        parts = gated_BSF if groups == 1 else gated_BSF.unflatten(-1, (groups, -1))
        return self.norm(parts).reshape(gated_BSF.shape).to(x_BSD.dtype), state

    def _scanned(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return what the recurrence computes of all positions, [B, S, F] in float32, and the state after
        them."""
        mamba = self.mamba
        inputs_BSF = torch.cat((self.x(x_BSD), self.B(x_BSD), self.C(x_BSD)), dim=-1)
        past_BWF = None if past is None else past.inputs_BWF
        mixed_BSF = convolved(inputs_BSF, self.conv.weight.squeeze(1), past_BWF, self.conv.bias)
        sizes = [mamba.value_size, mamba.key_size, mamba.key_size]
        x_BSF, b_BSF, c_BSF = mixed_BSF.to(torch.float32).split(sizes, dim=-1)
        repeat = mamba.num_heads // mamba.num_key_heads
        b_BSHK, c_BSHK = (
            each.unflatten(-1, (-1, mamba.key_dim)).repeat_interleave(repeat, dim=-2)
            for each in (b_BSF, c_BSF)
        )
        x_BSHV = x_BSF.unflatten(-1, (-1, mamba.value_dim))
        dt_BSH = F.softplus(self.dt(x_BSD).to(torch.float32) + self.dt_bias)
        out_BSHV, state = state_space_scan(
            c_BSHK,
            b_BSHK,
            x_BSHV * dt_BSH.unsqueeze(-1),
            -self.A_log.to(torch.float32).exp() * dt_BSH,
            None if past is None else past.heads_BHKV,
        )
        out_BSHV = out_BSHV + self.D.to(torch.float32).unsqueeze(-1) * x_BSHV
        return out_BSHV.flatten(-2), RecurrentState(
            last_inputs(inputs_BSF, past_BWF, mamba.kernel_size), state
        )
