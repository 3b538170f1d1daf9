"""Gated sums (Muse Spark): how the output y of a half-layer is added to the residual x, channel by channel.

    x' = a x + b n(y),   b = sigmoid(g / t),   a = sqrt(max((1 - b) (1 + b), 1e-3))

g [D] are parameters of the half-layer and t is the temperature of the model. n is a norm (RMS): without a
weight after attention, and after an FFN or experts of w y, with weights w [D] that come before the norm and
not after it. Both numbers a and b are float32, and x' is rounded once. A half-layer still has the norm of its
input.

Shapes: D hidden.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.models.limits import SCALES
from compress.untrusted.fields import Fields

if TYPE_CHECKING:
    from compress.models.arch import Arch

LEAST_SQUARE = 1e-3
"""The least square of the factor a of the residual."""
LEAST_TEMPERATURE = 1e-3
GATES = "sum_gates"
"""The leaf of the parameters g, which are float32 in a model of any dtype."""
FFN_SCALE = "scale.weight"
"""The leaf of the weights w."""


@dataclass(frozen=True)
class GatedSums:
    """The facts of the gated sums of a model.

    Args:
        temperature: t, above 0.
    """

    temperature: float

    @property
    def num_streams(self) -> int:
        """The streams of the residual, which is one."""
        return 1

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding."""
        return True

    def shapes(self, hidden_size: int, *, of_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of an FFN's half-layer by their leaves; the head has none."""
        return {} if of_head else {GATES: (hidden_size,), FFN_SCALE: (hidden_size,)}

    def num_params(self, hidden_size: int, num_halves: int) -> int:
        """Return the parameters of so many half-layers, of which one half follow attention."""
        return num_halves // 2 * 3 * hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(stored: Fields) -> "GatedSums":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return GatedSums(stored.number("temperature", LEAST_TEMPERATURE, SCALES[1]))


def factors_of(gates_D: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the factors a and b [D] of the residual and of the output of a half-layer, float32."""
    logits_D = gates_D.to(torch.float32) / temperature
    output_D = torch.sigmoid(logits_D)
    square_D = torch.sigmoid(-logits_D) * (1 + output_D)
    return square_D.clamp(min=LEAST_SQUARE).sqrt(), output_D


def scaled_first(x: Tensor, weight: Tensor) -> Tensor:
    """Return x times a weight [D] that a norm has before it and not after it, in the dtype of x; the weight
    has its offset already."""
    wide = torch.promote_types(torch.float32, x.dtype)
    return (x.to(wide) * weight.to(wide)).to(x.dtype)


def gated_sum(x: Tensor, normed: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Return a x + b y [..., D] of the residual and of a normed output, rounded once."""
    of_residual_D, of_output_D = factors
    wide = torch.promote_types(torch.float32, x.dtype)
    return (of_residual_D * x.to(wide) + of_output_D * normed.to(wide)).to(x.dtype)


class InputScale(nn.Module):
    """The weights that outputs have before their norm; `offset` is added to them."""

    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weights."""
        return scaled_first(x, self.weight.to(torch.float32) + self.offset)


class GatedSum(nn.Module):
    """The gated sum of a half-layer: of attention, or of an FFN, whose outputs have weights."""

    def __init__(
        self, arch: "Arch", facts: GatedSums, norm: Callable[[Tensor], Tensor], *, ffn: bool
    ) -> None:
        super().__init__()
        self.sum_gates = nn.Parameter(torch.zeros(arch.hidden_size))
        if ffn:
            self.scale = InputScale(arch.hidden_size, arch.norm_offset)
        self.has_scale = ffn
        self.temperature = facts.temperature
        self.norm = norm

    def enter(self, x_BSD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return x, which the half-layer reads, and the function that returns the residual after it from its
        output."""

        def leave(y_BSD: Tensor) -> Tensor:
            scaled_BSD = self.scale(y_BSD) if self.has_scale else y_BSD
            factors = factors_of(self.sum_gates, self.temperature)
            return gated_sum(x_BSD, self.norm(scaled_BSD), factors)

        return x_BSD, leave
