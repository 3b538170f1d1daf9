"""The facts and the recurrence of a gated delta net (arXiv 2412.06464): linear attention whose state, a
matrix for each head, forgets by a gate and replaces what a key holds instead of adding to it.

    q, k, v = silu(conv(linears of x)),  q and k with length 1,  q then divided by sqrt(K)
    S_t = a_t S_{t-1} + k_t u_t,         u_t = b_t (v_t - k_t (a_t S_{t-1}))
    o_t = q_t S_t

with a_t = exp(-exp(A_log) softplus(decay(x) + dt_bias)) and b_t = sigmoid(beta(x)) for each head, or twice
that, so that states may change their sign (arXiv 2411.12537). In Kimi Delta Attention (arXiv 2510.26692) a_t
has a number for each row of a state, that is for each channel of its keys. Ling 3.0 (`bailing_hybrid` in
`transformers`) and GLM-5.3 bound it from below: a_t = exp(-bound sigmoid(exp(A_log) (decay(x) + dt_bias))).
The convolution is causal, over `kernel_size` positions, with its own weights for each channel. The outputs of
a head are normed, and multiplied by the silu of the gate; in Kimi Delta Attention by its sigmoid.

Shapes: B batch, S sequence, H value heads, G key heads, K key dimension, V value dimension, F channels of
the convolution, W positions of the convolution, N positions of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.recurrence import Recurrence
from compress.untrusted.fields import Fields

CHUNK = 64
"""Positions whose updates are solved for at once."""
CHANNEL_CHUNK = 16
"""Positions of a chunk where each channel of keys has a decay. Each pair of them has as many numbers as there
are channels: those of 32 heads of 128 channels take 4 MiB a sequence."""
LENGTH_EPS = 1e-6
"""The published code and `transformers` add this to the squared length of a query or a key before they divide
by its root."""
PLAIN_NORM = "delta.norm.weight"
"""The norm of a head, to whose weight nothing is added in any family."""


@dataclass(frozen=True)
class DeltaNet(Recurrence):
    """The widths of one gated delta net. `by_channel` is Kimi Delta Attention: each channel of keys has a
    decay of its own, gates act by their sigmoid, and queries, keys and values each have a convolution. With
    a `rank`, which is for those, decays and gates are linears of latents of so many numbers, which stay dense
    as decays do elsewhere. With a `doubled_beta` the factors of updates are from 0 to 2. With a
    `decay_bound` above 0, the log of a decay is at least its negative."""

    module: ClassVar[str] = "delta"

    rank: int = 0
    doubled_beta: bool = False
    by_channel: bool = False
    decay_bound: float = 0.0

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream; the gate is not among them where it reads a latent."""
        qkv = ("delta.q", "delta.k", "delta.v")
        return qkv if self.rank else (*qkv, "delta.gate")

    @property
    def has_wide_rates(self) -> bool:
        """Whether `A_log` is stored with four axes, as in Kimi Linear; GLM-5.3, whose decays are bounded, has
        one."""
        return self.rank > 0 and not self.decay_bound

    @property
    def num_decays(self) -> int:
        """The decays of all heads."""
        return self.num_heads * (self.key_dim if self.by_channel else 1)

    def why_unfit(self) -> str | None:
        """Return why the widths do not fit one another or the runtime, None where they do."""
        if self.rank and not self.by_channel:
            return (
                f"latents of {self.rank} numbers for decays of heads; only decays of channels have latents."
            )
        if self.by_channel and self.num_heads != self.num_key_heads:
            return (
                f"{self.num_heads} heads with decays of the channels of {self.num_key_heads} key heads; each "
                "head has keys of its own then."
            )
        return super().why_unfit()

    @classmethod
    def from_json(cls, stored: Fields) -> Self:
        """Read what a manifest states; older ones state a `rank` alone of decays that are by channel."""
        read = super().from_json(stored)
        return replace(read, by_channel=read.by_channel or read.rank > 0)

    @property
    def beta_factor(self) -> float:
        """The factor of the sigmoid of beta."""
        return 2.0 if self.doubled_beta else 1.0

    @property
    def channel_sizes(self) -> tuple[int, int, int]:
        """The channels of the convolution: of queries, of keys and of values."""
        return self.key_size, self.key_size, self.value_size

    @property
    def convolutions(self) -> Mapping[str, int]:
        """The names of the convolutions and the channels of each: one of queries, keys and values, or one of
        each of them."""
        if not self.by_channel:
            return {"conv": self.num_channels}
        return dict(zip(("q_conv", "k_conv", "v_conv"), self.channel_sizes, strict=True))

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        gate = {} if self.rank else {"delta.gate": (self.value_size, hidden_size)}
        return {
            "delta.q": (self.key_size, hidden_size),
            "delta.k": (self.key_size, hidden_size),
            "delta.v": (self.value_size, hidden_size),
            **gate,
            "delta.o": (hidden_size, self.value_size),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""
        return {
            **{
                f"delta.{name}.weight": (size, 1, self.kernel_size)
                for name, size in self.convolutions.items()
            },
            "delta.beta.weight": (self.num_heads, hidden_size),
            "delta.decay.weight": (self.num_decays, self.rank or hidden_size),
            "delta.dt_bias": (self.num_decays,),
            "delta.A_log": (1, 1, self.num_heads, 1) if self.has_wide_rates else (self.num_heads,),
            PLAIN_NORM: (self.value_dim,),
            **(self._latent_shapes(hidden_size) if self.rank else {}),
        }

    def _latent_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        return {
            "delta.decay_down.weight": (self.rank, hidden_size),
            "delta.gate_down.weight": (self.rank, hidden_size),
            "delta.gate.weight": (self.value_size, self.rank),
        }


def log_decays(delta: DeltaNet, decay: Tensor, dt_bias: Tensor, rate: Tensor) -> Tensor:
    """Return the log of what states keep, by head [..., H, D / H], of the outputs of the linear of decays
    [..., D] in float32, `dt_bias` [D] and -exp(A_log) [H]; D / H is 1, or K where decays are by channel."""
    biased = (decay + dt_bias).unflatten(-1, (delta.num_heads, -1))
    if delta.decay_bound:
        return -delta.decay_bound * torch.sigmoid(-rate.unsqueeze(-1) * biased)
    return rate.unsqueeze(-1) * F.softplus(biased)


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
    """Return the outputs [B, S, H, V] and the last state [B, H, K, V] of the recurrence, in float32; decays
    of channels are [B, S, H, K].

    Within a chunk, the updates u solve a triangular system (the WY form of arXiv 2406.06484 with decays), so
    that the work is matrix products, and one step of the recurrence a chunk.
    """
    operands = q_BSHK, k_BSHK, v_BSHV, log_decay_BSH, beta_BSH
    length = q_BSHK.shape[1]
    if log_decay_BSH.dim() == 4:
        return _rule_of_channels(_in_chunks(operands, CHANNEL_CHUNK), length, state_BHKV)
    q, k, v, log_decay, beta = _in_chunks(operands, CHUNK)
    chunk = q.shape[3]
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


def _in_chunks(operands: tuple[Tensor, ...], most: int) -> tuple[Tensor, ...]:
    """Return tensors [B, S, H, ...] as [B, H, chunks, N, ...], float32, with zeros at the end; N is `most`
    in sequences that are as long."""
    length = operands[0].shape[1]
    chunk = min(most, length)

    def chunks(x_BSH: Tensor) -> Tensor:
        x = x_BSH.to(torch.float32).transpose(1, 2)
        padded = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, -length % chunk))
        return padded.unflatten(2, (-1, chunk))

    return tuple(map(chunks, operands))


def _rule_of_channels(
    operands: tuple[Tensor, ...], length: int, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what `gated_delta_rule` does, with decays of channels, from its operands in chunks.

    What a state keeps of a channel between two positions is the exponential of a difference of sums, which
    is never positive: the quotient of two exponentials would overflow where a channel forgets fast.
    """
    q, k, v, *_ = operands
    chunk = q.shape[3]
    unseen = ~torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
    eye = torch.eye(chunk, device=q.device)
    state = (
        q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        if state_BHKV is None
        else state_BHKV.to(torch.float32)
    )
    outputs = []
    for q_N, k_N, v_N, log_decay_N, beta_N in zip(*(each.unbind(2) for each in operands), strict=True):
        total = log_decay_N.cumsum(-2)
        between = total.unsqueeze(-2) - total.unsqueeze(-3)
        kept_keys = between.masked_fill(unseen, -torch.inf).exp() * k_N.unsqueeze(-3)
        products = kept_keys @ torch.stack((k_N, q_N), dim=-1)
        of_keys, scores = products.unbind(-1)
        beta_N1 = beta_N.unsqueeze(-1)
        system = (beta_N1 * of_keys).tril(-1) + eye
        since_start = total.exp()
        both = torch.cat((beta_N1 * v_N, beta_N1 * since_start * k_N), dim=-1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        own, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        update = own - of_state @ state
        outputs.append((q_N * since_start) @ state + scores @ update)
        to_end = k_N * (total[..., -1:, :] - total).exp()
        state = state * since_start[..., -1, :].unsqueeze(-1) + to_end.mT @ update
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state
