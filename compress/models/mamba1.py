"""The facts and the recurrence of a Mamba-1 mixer (arXiv 2312.00752): a selective state space model, in which
each channel has a state of K numbers, and each number of it forgets at a rate of its own.

    x, z = linears of the input,  x = silu(conv(x) + bias)
    d, B, C = x_proj(x), each of them normed if the mixer has norms,  dt = softplus(dt_proj(d) + bias)
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + (dt_t x_t) B_t
    y_t = (S_t C_t + D x_t) silu(z_t)

In the terms of linear attention C are queries, B keys and x values of one head, whose decays are by number of
the state. The convolution is causal, over `kernel_size` positions, with its own weights for each channel.

`x_proj` and `dt_proj` stay dense in every scheme: they hold about 4 % of the weights of a mixer in Jamba, and
decide how long its state remembers, so that an error of theirs grows with the sequence.

Shapes: B batch, S sequence, V channels, K numbers of the state of a channel, R rank of dt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.models.recurrence import Recurrence

CHUNK = 32
"""Positions whose factors of the state are computed at once."""
RATES = "mamba1.A_log"
"""The logarithms of the rates of forgetting; those of new mixers are 1 to K in each channel (section 3.6)."""
NORMS = ("dt_norm", "B_norm", "C_norm")
"""The norms of d, B and C, in the order in which `x_proj` computes them."""


@dataclass(frozen=True)
class Mamba1(Recurrence):
    """The widths of one Mamba-1 mixer: one head with as many values as there are channels, and keys of as
    many numbers as the state of a channel. `rank` is that of dt. The convolution has a bias or none, and d, B
    and C have norms if the mixer is `normed`, with weights or as `unit_norms` without."""

    module: ClassVar[str] = "mamba1"
    name: ClassVar[str] = "a Mamba-1 mixer"
    may_join: ClassVar[bool] = False

    rank: int
    conv_bias: bool
    normed: bool = True
    unit_norms: bool = False

    @staticmethod
    def of(
        channels: int,
        state_size: int,
        kernel_size: int,
        rank: int,
        *,
        conv_bias: bool,
        normed: bool = True,
        unit_norms: bool = False,
    ) -> "Mamba1":
        """Return the widths for so many channels and numbers of the state of each."""
        return Mamba1(1, 1, state_size, channels, kernel_size, rank, conv_bias, normed, unit_norms)

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream."""
        return ("mamba1.x", "mamba1.gate")

    @property
    def has_norm_weights(self) -> bool:
        """Whether d, B and C have norms with weights."""
        return self.normed and not self.unit_norms

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: the values alone."""
        return self.value_size

    @property
    def inner_sizes(self) -> tuple[int, int, int]:
        """The rows of `x_proj` that compute d, B and C."""
        return self.rank, self.key_dim, self.key_dim

    def why_unfit(self) -> str | None:
        """Return why the widths do not fit one another or the runtime, None where they do."""
        if self.num_heads != 1 or self.num_key_heads != 1:
            return f"{self.num_heads} heads of a Mamba-1 mixer, which has one."
        if self.unit_norms and not self.normed:
            return "norms of a Mamba-1 mixer have no weights, and it has no norms."
        return super().why_unfit()

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        return {
            **dict.fromkeys(self.first_linears, (self.value_size, hidden_size)),
            "mamba1.o": (hidden_size, self.value_size),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""
        sizes = zip(NORMS, self.inner_sizes, strict=True)
        norms = {f"mamba1.{name}.weight": (size,) for name, size in sizes} if self.has_norm_weights else {}
        bias = {"mamba1.conv.bias": (self.value_size,)} if self.conv_bias else {}
        return {
            "mamba1.conv.weight": (self.value_size, 1, self.kernel_size),
            **bias,
            "mamba1.x_proj.weight": (sum(self.inner_sizes), self.value_size),
            **norms,
            "mamba1.dt_proj.weight": (self.value_size, self.rank),
            "mamba1.dt_proj.bias": (self.value_size,),
            RATES: (self.value_size, self.key_dim),
            "mamba1.D": (self.value_size,),
        }


def selective_scan(
    x_BSV: Tensor,
    dt_BSV: Tensor,
    rate_VK: Tensor,
    b_BSK: Tensor,
    c_BSK: Tensor,
    state_BVK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return S_t C_t [B, S, V] with S_t = exp(rate dt_t) S_{t-1} + (dt_t x_t) B_t, and the last state
    [B, V, K], in float32. `rate_VK` is -exp(A_log)."""
    x_BSV, dt_BSV, b_BSK, c_BSK = (each.to(torch.float32) for each in (x_BSV, dt_BSV, b_BSK, c_BSK))
    state = (
        x_BSV.new_zeros(x_BSV.shape[0], *rate_VK.shape) if state_BVK is None else state_BVK.to(torch.float32)
    )
    outputs = []
    operands = (dt_BSV, x_BSV * dt_BSV, b_BSK, c_BSK)
    for dt_BNV, added_BNV, b_BNK, c_BNK in zip(*(each.split(CHUNK, dim=1) for each in operands), strict=True):
        kept_BNVK = (rate_VK * dt_BNV.unsqueeze(-1)).exp()
        added_BNVK = added_BNV.unsqueeze(-1) * b_BNK.unsqueeze(-2)
        states = []
        for kept_BVK, added_BVK in zip(kept_BNVK.unbind(1), added_BNVK.unbind(1), strict=True):
            state = state * kept_BVK + added_BVK
            states.append(state)
        outputs.append((torch.stack(states, dim=1) @ c_BNK.unsqueeze(-1)).squeeze(-1))
    return torch.cat(outputs, dim=1), state
