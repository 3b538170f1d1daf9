"""The facts and the recurrence of a Mamba-2 mixer (arXiv 2405.21060): a state space model whose state, a
matrix for each head, forgets by a factor of the head and the position.

    x, B, C = silu(conv(linears of the input) + bias),  dt = softplus(dt(input) + dt_bias)
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)
    y_t = C_t S_t + D x_t

In the terms of linear attention C are queries, B keys and x values, and groups are key heads. The convolution
is causal, over `kernel_size` positions, with its own weights for each channel. The outputs of all heads are
multiplied by the silu of a gate, and then normed if the mixer has a norm.

Shapes: B batch, S sequence, H heads, K state size of a head (that of its queries and keys), V dimension of a
head, N positions of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.recurrence import Recurrence

CHUNK = 64
"""Positions that attend to one another at once."""
NORM = "mamba.norm.weight"


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """The widths of one Mamba-2 mixer. One norm spans the outputs of all heads of a key head, if the mixer is
    `normed`; the convolution has a bias or none."""

    module: ClassVar[str] = "mamba"

    conv_bias: bool
    normed: bool = True

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream."""
        return ("mamba.C", "mamba.B", "mamba.x", "mamba.gate", "mamba.dt")

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        return {
            "mamba.C": (self.key_size, hidden_size),
            "mamba.B": (self.key_size, hidden_size),
            "mamba.x": (self.value_size, hidden_size),
            "mamba.gate": (self.value_size, hidden_size),
            "mamba.dt": (self.num_heads, hidden_size),
            "mamba.o": (hidden_size, self.value_size),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters. The channels of the convolution are those of x, B and
        C, as checkpoints have them."""
        bias = {"mamba.conv.bias": (self.num_channels,)} if self.conv_bias else {}
        norm = {NORM: (self.value_size,)} if self.normed else {}
        return {
            "mamba.conv.weight": (self.num_channels, 1, self.kernel_size),
            **bias,
            "mamba.dt_bias": (self.num_heads,),
            "mamba.A_log": (self.num_heads,),
            "mamba.D": (self.num_heads,),
            **norm,
        }


def state_space_scan(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    log_decay_BSH: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return q_t S_t [B, S, H, V] with S_t = exp(log_decay_t) S_{t-1} + k_t v_t, and the last state
    [B, H, K, V], in float32.

    Within a chunk each position attends to those before it; a chunk is one step of the recurrence (arXiv
    2405.21060, section 6).
    """
    length = q_BSHK.shape[1]
    chunk = min(CHUNK, length)
    rest = -length % chunk

    def chunks(x_BSH: Tensor) -> Tensor:
        """Return [B, S, H, ...] as [B, H, chunks, N, ...], float32, with zeros at the end."""
        x = x_BSH.to(torch.float32).transpose(1, 2)
        padded = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, rest))
        return padded.unflatten(2, (-1, chunk))

    q, k, v, log_decay = map(chunks, (q_BSHK, k_BSHK, v_BSHV, log_decay_BSH))
    total = log_decay.cumsum(-1)
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    kept = between.masked_fill(~ones.tril(), -torch.inf).exp()
    own = (kept * (q @ k.mT)) @ v
    since_start = q * total.exp().unsqueeze(-1)
    to_end = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT @ v
    state = (
        q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        if state_BHKV is None
        else state_BHKV.to(torch.float32)
    )
    outputs = []
    for idx in range(q.shape[2]):
        outputs.append(own[:, :, idx] + since_start[:, :, idx] @ state)
        state = state * total[:, :, idx, -1, None, None].exp() + to_end[:, :, idx]
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state
