"""Sums with the normed residual (MiniMax-01, arXiv 2501.08313; DeepNorm, arXiv 2203.00555): a half-layer adds
its output not to the residual x that it reads, but to the norm of it, which it computes anyway.

    n = norm(x),   x' = a n + b f(n)

f is attention or a recurrence, or an FFN or experts; the factors a and b of each of the three kinds of
half-layers, attention, recurrences and FFNs, are constants of the model. x' is rounded once, where
`transformers` rounds every step. As the residual is normed, too, no scale of channels can be moved from the
linears that read n into the weights of the norm.

Shapes: D hidden.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.layer_shape import Half
from compress.models.limits import SCALES
from compress.untrusted.fields import Fields


@dataclass(frozen=True)
class NormedSums:
    """The factors of the normed residual and of the outputs of half-layers, of those with `attention`, with a
    `recurrence` and with an `ffn` or experts."""

    attention_residual: float
    attention_output: float
    recurrence_residual: float
    recurrence_output: float
    ffn_residual: float
    ffn_output: float

    @property
    def num_streams(self) -> int:
        """The streams of the residual, which is one."""
        return 1

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding."""
        return True

    def shapes(self, hidden_size: int, *, of_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a half-layer, or of the head: there are none."""
        del hidden_size, of_head
        return {}

    def num_params(self, hidden_size: int, num_halves: int) -> int:
        """Return the number of parameters of half-layers and of the head, 0."""
        del hidden_size, num_halves
        return 0

    def factors(self, half: Half, *, recurs: bool) -> tuple[float, float]:
        """Return the factors a and b of a half of a layer, which has a recurrence or has none."""
        if half == "ffn":
            return self.ffn_residual, self.ffn_output
        if recurs:
            return self.recurrence_residual, self.recurrence_output
        return self.attention_residual, self.attention_output

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(stored: Fields) -> "NormedSums":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        names = (each.name for each in dataclasses.fields(NormedSums))
        return NormedSums(**{name: stored.number(name, *SCALES) for name in names})


def normed_sum(normed: Tensor, y: Tensor, factors: tuple[float, float]) -> Tensor:
    """Return a n + b y [..., D] of the normed residual and of the output of a half-layer, rounded once."""
    of_residual, of_output = factors
    wide = torch.promote_types(torch.float32, normed.dtype)
    return (of_residual * normed.to(wide) + of_output * y.to(wide)).to(normed.dtype)


class NormedSum(nn.Module):
    """The sum of a half-layer with the normed residual; `norm` is the norm of what the half-layer reads."""

    def __init__(self, factors: tuple[float, float], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.factors = factors
        self._norm = (norm,)  # in a tuple, as its weights are the layer's own

    def enter(self, x_BSD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return x, which the half-layer norms and reads, and the function that returns the residual after it
        from its output."""
        return x_BSD, lambda y_BSD: normed_sum(self._norm[0](x_BSD), y_BSD, self.factors)
