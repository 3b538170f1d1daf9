"""Lightning attention (arXiv 2401.04658; MiniMax-01, arXiv 2501.08313): linear attention whose state, a
matrix for each head, forgets by a constant factor of the head and of the layer.

    q, k, v = silu(linears of the input)
    S_t = exp(-s_h) S_{t-1} + k_t v_t,   s_h = r 2^(-8 h / H),  h = 1 to H
    y_t = sigmoid(gate(input)) norm(q_t S_t)

One norm (RMS) with weights spans the outputs of all heads. r, the `decay_rate` of the layer, falls from about
1 in the first layer of a model to about 1e-5 in the last. It is no parameter: it follows from the index of
the layer and the number of layers (`decay_rate_of`). A state space model of Mamba-2 (`mamba2.py`) computes
q_t S_t with q as C, k as B, v as x, dt = 1 and D = 0, and without its convolution.

Shapes: H heads, K dimension of a head, Z = H K.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from compress.models.recurrence import Recurrence

LIGHTNING_NORM = "lightning.norm"
"""The norm of the outputs of all heads."""
_EPS = 1e-5
"""The published code and `transformers` add this to a difference and to a factor of r."""


@dataclass(frozen=True)
class Lightning(Recurrence):
    """The widths of one lightning attention, in which each head has a key of its own that is as wide as its
    value, and no convolution; and the decay rate r of the layer."""

    module: ClassVar[str] = "lightning"
    name: ClassVar[str] = "lightning attention"
    may_join: ClassVar[bool] = False

    decay_rate: float = 1.0

    @staticmethod
    def of(num_heads: int, head_dim: int) -> "Lightning":
        """Return the widths of so many heads."""
        return Lightning(num_heads, num_heads, head_dim, head_dim, kernel_size=1)

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream."""
        return ("lightning.q", "lightning.k", "lightning.v", "lightning.gate")

    @property
    def of_state(self) -> Recurrence:
        """The widths of its states, which the decay rate does not change."""
        return replace(self, decay_rate=1.0)

    @property
    def slopes(self) -> tuple[float, ...]:
        """The number s_h of each head."""
        return tuple(
            self.decay_rate * math.exp2(-8 * head / self.num_heads) for head in range(1, self.num_heads + 1)
        )

    def why_unfit(self) -> str | None:
        """Return why the widths do not fit one another or the runtime, None where they do."""
        if self.kernel_size != 1:
            return f"lightning attention with a convolution over {self.kernel_size} positions; it has none."
        if self.num_key_heads != self.num_heads or self.key_dim != self.value_dim:
            return (
                f"lightning attention with {self.num_key_heads} keys of {self.key_dim} numbers for "
                f"{self.num_heads} values of {self.value_dim}; each head has one of each, of one width."
            )
        return super().why_unfit()

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        return {
            **dict.fromkeys(self.first_linears, (self.value_size, hidden_size)),
            "lightning.o": (hidden_size, self.value_size),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""
        return {f"{LIGHTNING_NORM}.weight": (self.value_size,)}


def decay_rate_of(layer_idx: int, num_layers: int) -> float:
    """Return r of a layer of a model with so many layers."""
    return 1 - layer_idx / (num_layers - 1 + _EPS) + _EPS
