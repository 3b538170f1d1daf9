"""Shortcut-connected mixtures (LongCat-Flash, arXiv 2509.01322): the output of the routed experts of a layer
is added to the residual after the next layer, so that they may run while that layer does.

The residual of a token is two streams, x and what waits, w, which is 0 before the first layer. Every
half-layer reads x, and its output y changes them:

    attention             x' = x + y          w' = w
    experts               x' = x + y_shared   w' = y_routed
    an FFN after them     x' = x + y + w      w' = 0

The head reads x. Experts that are `delayed` (`Experts.delayed`) return y_shared and y_routed side by side.

Shapes: D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from compress.models.layer_shape import Half, LayerShape
from compress.untrusted.fields import Fields

Sum = Literal["mixer", "experts", "ffn"]
"""How the output of a half-layer changes the two streams."""


@dataclass(frozen=True)
class Shortcuts:
    """The fact that a model has shortcut-connected mixtures."""

    @property
    def num_streams(self) -> int:
        """The streams of the residual: x and w."""
        return 2

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding: w begins as 0."""
        return False

    def shapes(self, hidden_size: int, *, of_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a half-layer, or of the head: there are none."""
        del hidden_size, of_head
        return {}

    def num_params(self, hidden_size: int, num_halves: int) -> int:
        """Return the number of parameters of half-layers and of the head, 0."""
        del hidden_size, num_halves
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the fact as a manifest stores it."""
        return {"shortcuts": True}

    @classmethod
    def from_json(cls, stored: Fields) -> Self:
        """Read the fact as a manifest stores it. `Fields` raises its error for a value other than true."""
        if not stored.flag("shortcuts"):
            raise stored.wrong("shortcuts", False, "true")
        return cls()


def sum_of(shape: LayerShape, half: Half) -> Sum:
    """Return how the output of a half of a layer changes the two streams."""
    if half == "mixer":
        return "mixer"
    return "ffn" if shape.experts is None else "experts"


def added(kind: Sum, streams_E: Tensor, y: Tensor) -> Tensor:
    """Return the two streams [..., 2 D] after a half-layer with the output y [..., D], or [..., 2 D] of
    experts."""
    x_D, waiting_D = streams_E.chunk(2, dim=-1)
    if kind == "mixer":
        return torch.cat((x_D + y, waiting_D), dim=-1)
    if kind == "experts":
        shared_D, routed_D = y.chunk(2, dim=-1)
        return torch.cat((x_D + shared_D, routed_D), dim=-1)
    return torch.cat((x_D + y + waiting_D, torch.zeros_like(waiting_D)), dim=-1)


def first_stream(streams_E: Tensor) -> Tensor:
    """Return x [..., D], which half-layers and the head read."""
    return streams_E.chunk(2, dim=-1)[0].contiguous()


class ShortcutSum(nn.Module):
    """The sum of a half-layer with the two streams."""

    def __init__(self, kind: Sum) -> None:
        super().__init__()
        self.kind = kind

    def enter(self, streams_E: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return x, which the half-layer reads, and the function that returns the streams after it from its
        output."""
        return first_stream(streams_E), lambda y: added(self.kind, streams_E, y)


class FirstStream(nn.Module):
    """Module that returns what the head reads of the two streams."""

    def forward(self, streams_E: Tensor) -> Tensor:
        """Return x [..., D]."""
        return first_stream(streams_E)
