"""Gated residuals (Qwen4): the residual of a token is several streams, of which a half-layer reads a mixture,
each channel of each stream by a gate of its own, and to each of which its output is added.

    u_i = norm_i(s_i)                             s_i: stream i of n [D], u all of them one after the other
    m   = sigmoid(W_up silu(W_down u / n))        [n D]
    x   = (m_0 u_0 + ... + m_{n-1} u_{n-1}) / n   the input of the half-layer, without another norm
    s'_i = s_i + q_i y,  q = 2 sigmoid(W_q u / n) y: its output

The first streams are n copies of the embedding, and the head reads x of parameters of its own, without q.
W_down, W_up and W_q are in the dtype of the model, and no scheme is theirs; q is float32, and s' is rounded
once, where `transformers` rounds every step.

Shapes: n streams, D hidden, E = n D, R the rank of the gates.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.gated_sum import GatedSums
from compress.models.hyper_connection import MAX_STREAMS, HyperConnections
from compress.models.limits import MAX_SIZE
from compress.models.normed_sum import NormedSums
from compress.models.shortcut import Shortcuts
from compress.untrusted.fields import Fields


@dataclass(frozen=True)
class GatedResiduals:
    """The facts of the gated residuals of a model.

    Args:
        num_streams: n, at least 2.
        rank: R, the width between the two linears of the gates.
    """

    num_streams: int
    rank: int

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding."""
        return True

    def shapes(self, hidden_size: int, *, of_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a half-layer, or of the head, by their leaves."""
        size = self.num_streams * hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "norm.weight": (size,),
            "down.weight": (self.rank, size),
            "up.weight": (size, self.rank),
        }
        return shapes if of_head else {**shapes, "inject.weight": (self.num_streams, size)}

    def num_params(self, hidden_size: int, num_halves: int) -> int:
        """Return the parameters of so many half-layers and of the head."""
        of_half, of_head = (
            sum(map(math.prod, self.shapes(hidden_size, of_head=each).values())) for each in (False, True)
        )
        return num_halves * of_half + of_head

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        return dataclasses.asdict(self)


ResidualFacts = HyperConnections | GatedResiduals | GatedSums | NormedSums | Shortcuts
"""How half-layers read the residual and add to it, where that is no plain sum."""


def streams_from_json(stored: Fields) -> ResidualFacts:
    """Read the facts of the residual as a manifest stores them: shortcut-connected mixtures have `shortcuts`,
    gated sums a temperature, sums with the normed residual a factor of it after attention, and gated
    residuals a rank. `Fields` raises its error for a value that is missing, of another type or out of
    range."""
    if stored.has("shortcuts"):
        return Shortcuts.from_json(stored)
    if stored.has("temperature"):
        return GatedSums.from_json(stored)
    if stored.has("attention_residual"):
        return NormedSums.from_json(stored)
    if not stored.has("rank"):
        return HyperConnections.from_json(stored)
    return GatedResiduals(
        num_streams=stored.integer("num_streams", 2, MAX_STREAMS), rank=stored.integer("rank", 1, MAX_SIZE)
    )


def gates_of(x_R: Tensor, num_streams: int) -> Tensor:
    """Return silu(x / n) of the products [..., R] with W_down."""
    return F.silu(x_R / num_streams)


def injections_of(x_n: Tensor, num_streams: int) -> Tensor:
    """Return q [..., n] of the products with W_q."""
    return 2 * torch.sigmoid(x_n / num_streams)


def gated_mean(normed_TE: Tensor, gates_TE: Tensor, num_streams: int) -> Tensor:
    """Return the mean [..., D] of normed streams, each channel times its gate, float32; the streams are added
    in their order."""
    first, *others = (normed_TE * gates_TE).unflatten(-1, (num_streams, -1)).unbind(-2)
    for each in others:
        first = first + each
    return first / num_streams
