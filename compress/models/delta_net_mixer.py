"""The module of a gated delta net (`delta_net.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, H value heads, K key dimension, V value dimension, F outputs of
linears, W positions of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet, gated_delta_rule, log_decays, of_length_one
from compress.models.layer_shape import LayerShape
from compress.models.linear import Linear
from compress.models.norms import Norm
from compress.models.recurrence import RecurrentState, convolved, last_inputs
from compress.models.recurrent_mixer import RecurrentMixer, convolution_of


class GatedDeltaNet(RecurrentMixer):
    """Linear attention with its linears."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, delta: DeltaNet) -> None:
        super().__init__(arch, shape)
        self.delta = delta
        self.beta = Linear(arch.hidden_size, delta.num_heads, bias=False)
        self.decay = Linear(delta.rank or arch.hidden_size, delta.num_decays, bias=False)
        if delta.rank:
            self.decay_down = Linear(arch.hidden_size, delta.rank, bias=False)
            self.gate_down = Linear(arch.hidden_size, delta.rank, bias=False)
            self.gate = Linear(delta.rank, delta.value_size, bias=False)
        for name, channels in delta.convolutions.items():
            self.add_module(name, convolution_of(delta, channels))
        self.dt_bias = nn.Parameter(torch.ones(delta.num_decays))
        self.A_log = nn.Parameter(torch.zeros(delta.dense_shapes(arch.hidden_size)["delta.A_log"]))
        self.norm = Norm(delta.value_dim, arch.eps_of("delta.norm"))

    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of all heads, each normed, and gated."""
        out_BSHV, state = self._attended(x_BSD, past)
        normed_BSF = self.norm(out_BSHV.to(x_BSD.dtype)).flatten(-2)
        gate_BSF = self.gate(self.gate_down(x_BSD) if self.delta.rank else x_BSD).to(torch.float32)
        factor_BSF = torch.sigmoid(gate_BSF) if self.delta.by_channel else F.silu(gate_BSF)
        return (normed_BSF * factor_BSF).to(x_BSD.dtype), state

    def _attended(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return what the recurrence computes of all positions, [B, S, H, V], and the state after them."""
        delta = self.delta
        inputs_BSF = torch.cat((self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)), dim=-1)
        past_BWF = None if past is None else past.inputs_BWF
        mixed_BSF = convolved(inputs_BSF, self._convolution_weights(), past_BWF)
        sizes = [delta.key_size, delta.key_size, delta.value_size]
        q_BSF, k_BSF, v_BSF = mixed_BSF.split(sizes, dim=-1)
        repeat = delta.num_heads // delta.num_key_heads
        q_BSHK, k_BSHK = (
            of_length_one(each.unflatten(-1, (-1, delta.key_dim))).repeat_interleave(repeat, dim=-2)
            for each in (q_BSF, k_BSF)
        )
        out_BSHV, state = gated_delta_rule(
            q_BSHK * delta.key_dim**-0.5,
            k_BSHK,
            v_BSF.unflatten(-1, (-1, delta.value_dim)),
            self._log_decay(x_BSD),
            delta.beta_factor * torch.sigmoid(self.beta(x_BSD)),
            None if past is None else past.heads_BHKV,
        )
        return out_BSHV, RecurrentState(last_inputs(inputs_BSF, past_BWF, delta.kernel_size), state)

    def _convolution_weights(self) -> Tensor:
        """Return the weights of the convolution of queries, keys and values [F, W]."""
        weights = (self.get_parameter(f"{name}.weight") for name in self.delta.convolutions)
        return torch.cat(tuple(weights)).squeeze(1)

    def _log_decay(self, x_BSD: Tensor) -> Tensor:
        """Return the log of what states keep, float32: of each head [B, S, H], or of each channel of its keys
        [B, S, H, K]."""
        read_BSD = self.decay_down(x_BSD) if self.delta.rank else x_BSD
        rate_H = -self.A_log.to(torch.float32).exp().flatten()
        log_BSHD = log_decays(self.delta, self.decay(read_BSD).to(torch.float32), self.dt_bias, rate_H)
        return log_BSHD if self.delta.by_channel else log_BSHD.squeeze(-1)
