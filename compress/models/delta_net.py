"""The facts and the recurrence of a gated delta net (arXiv 2412.06464): linear attention whose state, a
matrix for each head, forgets by a gate and replaces what a key holds instead of adding to it.

    q, k, v = silu(conv(linears of x)),  q and k with length 1,  q then divided by sqrt(K)
    S_t = a_t S_{t-1} + k_t u_t,         u_t = b_t (v_t - k_t (a_t S_{t-1}))
    o_t = q_t S_t

with a_t = exp(-exp(A_log) softplus(decay(x) + dt_bias)) and b_t = sigmoid(beta(x)) for each head, or twice
that, so that states may change their sign (arXiv 2411.12537).
The convolution is causal, over `kernel_size` positions, with its own weights for each channel. The outputs of
a head are normed, and multiplied by the silu of the gate.

Shapes: B batch, S sequence, H value heads, G key heads, K key dimension, V value dimension, F channels of
the convolution, W positions of the convolution, N positions of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.recurrence import Recurrence

CHUNK = 64
"""Positions whose updates are solved for at once."""
LENGTH_EPS = 1e-6
"""The published code and `transformers` add this to the squared length of a query or a key before they divide
by its root."""
PLAIN_NORM = "delta.norm.weight"
"""The norm of a head, to whose weight nothing is added in any family."""


@dataclass(frozen=True)
class DeltaNet(Recurrence):
    """The widths of one gated delta net. With a `doubled_beta` the factors of updates are from 0 to 2."""

    module: ClassVar[str] = "delta"
    first_linears: ClassVar[tuple[str, ...]] = ("delta.q", "delta.k", "delta.v", "delta.gate")

    doubled_beta: bool = False

    @property
    def beta_factor(self) -> float:
        """The factor of the sigmoid of beta."""
        return 2.0 if self.doubled_beta else 1.0

    @property
    def channel_sizes(self) -> tuple[int, int, int]:
        """The channels of the convolution: of queries, of keys and of values."""
        return self.key_size, self.key_size, self.value_size

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        return {
            "delta.q": (self.key_size, hidden_size),
            "delta.k": (self.key_size, hidden_size),
            "delta.v": (self.value_size, hidden_size),
            "delta.gate": (self.value_size, hidden_size),
            "delta.o": (hidden_size, self.value_size),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""
        return {
            "delta.conv.weight": (self.num_channels, 1, self.kernel_size),
            "delta.beta.weight": (self.num_heads, hidden_size),
            "delta.decay.weight": (self.num_heads, hidden_size),
            "delta.dt_bias": (self.num_heads,),
            "delta.A_log": (self.num_heads,),
            PLAIN_NORM: (self.value_dim,),
        }


def of_length_one(x: Tensor) -> Tensor:
    """Return float32 vectors divided by their length."""
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    log_decay_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, S, H, V] and the last state [B, H, K, V] of the recurrence, in float32.

    Within a chunk, the updates u solve a triangular system (the WY form of arXiv 2406.06484 with decays), so
    that the work is matrix products, and one step of the recurrence a chunk.
    """
    length = q_BSHK.shape[1]
    chunk = min(CHUNK, length)
    rest = -length % chunk

    def chunks(x_BSH: Tensor) -> Tensor:
        """Return [B, S, H, ...] as [B, H, chunks, N, ...], float32, with zeros at the end."""
        x = x_BSH.to(torch.float32).transpose(1, 2)
        padded = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, rest))
        return padded.unflatten(2, (-1, chunk))

    q, k, v, log_decay, beta = map(chunks, (q_BSHK, k_BSHK, v_BSHV, log_decay_BSH, beta_BSH))
    total = log_decay.cumsum(-1)
    beta = beta.unsqueeze(-1)
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    kept = between.masked_fill(~ones.tril(), -torch.inf).exp()
    since_start = total.exp().unsqueeze(-1)
    system = (beta * kept * (k @ k.mT)).tril(-1) + torch.eye(chunk, device=q.device)
    both = torch.cat((beta * v, beta * since_start * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = kept * (q @ k.mT)
    to_end = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    state = (
        q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        if state_BHKV is None
        else state_BHKV.to(torch.float32)
    )
    outputs = []
    for idx in range(q.shape[2]):
        update = own[:, :, idx] - of_state[:, :, idx] @ state
        outputs.append((q * since_start)[:, :, idx] @ state + scores[:, :, idx] @ update)
        state = state * since_start[:, :, idx, -1:] + to_end[:, :, idx].mT @ update
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state
