"""Attention with linear biases (ALiBi, arXiv 2108.12409): each score has a term that falls with the distance
of the key, by a slope of its head. Positions are encoded by nothing else in the models that have it.

    s = scale q k - m_h (p_q - p_k)
    m_h = 2^(-x h / P), 1 <= h <= P                      slopes of P heads, P a power of two, x = 8
    m_(P+j) = 2^(-x (2 j - 1) / (2 P)), 1 <= j <= H - P   the others, where P is the largest below H

The softmax of a query does not change if a number is added to all its scores: programs that add m_h p_k
compute the same. Here terms follow the distance, so that those of near keys are as exact at any position.

Shapes: H heads, S queries, P keys.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.limits import SCALES
from compress.untrusted.fields import Fields


@dataclass(frozen=True)
class Alibi:
    """The slopes of the heads of a layer: `exponent` is x. With `as_powers` they are powers of the first one
    rounded to float32, as BLOOM has them; these differ in rounding. With `as_scores`
    they are rounded to bfloat16, and the scale of scores multiplies the terms, too (Falcon)."""

    exponent: float = 8.0
    as_powers: bool = False
    as_scores: bool = False

    def slopes(self, num_heads: int, scale: float) -> Tensor:
        """Return the slopes of so many heads, float32 [H] on the CPU, given the scale of scores."""
        whole = 1 << (num_heads.bit_length() - 1)
        places = [(place, whole) for place in range(1, whole + 1)]
        places += [(2 * idx + 1, 2 * whole) for idx in range(num_heads - whole)]
        slopes = torch.tensor([self._slope(*place) for place in places], dtype=torch.float32)
        return slopes.to(torch.bfloat16).to(torch.float32) * scale if self.as_scores else slopes

    def _slope(self, place: int, num_heads: int) -> float:
        """Return the slope of a head, counted from 1, of a power of two of heads. It is rounded once: what
        PyTorch raises to a power in float32 has other bits in a tensor of another length."""
        if not self.as_powers:
            return float(2.0 ** (-self.exponent * place / num_heads))
        first = torch.tensor(2.0 ** (-self.exponent / num_heads), dtype=torch.float32)
        return float(first.item() ** place)

    @staticmethod
    def from_json(stored: Fields) -> "Alibi":
        """Read what a manifest states.

        Raises:
            StorageError: a value is missing, of another type or out of range.
        """
        exponent = stored.number("exponent", *SCALES)
        if exponent <= 0:
            raise stored.wrong("exponent", exponent, "above 0")
        flags = {name: stored.flag(name, default=False) for name in ("as_powers", "as_scores")}
        return Alibi(exponent, **flags)

    def to_json(self) -> Mapping[str, object]:
        """Return what `from_json` reads."""
        flags = {name: value for name, value in dataclasses.asdict(self).items() if value is True}
        return {"exponent": self.exponent, **flags}


def by_distance(slopes_H: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return the terms of the scores [H, S, P] of the last S of P positions, float32; those of keys after the
    query are above 0."""
    positions = torch.arange(num_keys, device=slopes_H.device)
    distance_SP = positions[num_keys - num_queries :].unsqueeze(1) - positions
    return slopes_H.view(-1, 1, 1) * -distance_SP
