"""Relative logits of attention (Inkling, 2026): each score has a term that depends on the query and on how
far back its key is.

    r = W x                                               R numbers of each head, of the input of attention
    b_d = sum_i r_i P_id for 0 <= d < E, 0 further back   the term of the key d positions before the query
    s = (scale q k + b_d) t_p,  t_p = 1 + a ln(max((p + 1) / n, 1))

The heads of a layer share the profiles P over distance. The growth t of the scores of the query at position p
is 1 in layers that have none. Positions are encoded by nothing else in Inkling, whose layers have no rope.

Shapes: T tokens, B batch, S sequence, P keys, H heads, R numbers of a head, E distances.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.limits import MAX_POSITIONS, MAX_SIZE, SCALES
from compress.untrusted.fields import Fields

RELATIVE = "attn.relative"
"""The linear W of a layer [H R, D], which no scheme quantizes."""
PROFILES = "attn.profiles"
"""The profiles P of a layer [R, E]."""


@dataclass(frozen=True)
class RelativeLogits:
    """The relative logits of one layer: `rank` is R, `extent` E, and `growth` are a and n."""

    rank: int
    extent: int
    growth: tuple[float, int] | None = None

    def dense_shapes(self, num_heads: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a layer with so many query heads."""
        return {
            f"{RELATIVE}.weight": (num_heads * self.rank, hidden_size),
            PROFILES: (self.rank, self.extent),
        }

    def growth_at(self, positions: Tensor) -> Tensor | None:
        """Return the factor t of the scores of the query at each position, float32; None where it is 1."""
        if self.growth is None:
            return None
        factor, num_positions = self.growth
        reached = (positions + 1).to(torch.float32) / num_positions
        return 1 + factor * torch.log(reached.clamp(min=1))

    @staticmethod
    def from_json(stored: Fields) -> "RelativeLogits":
        """Read what a manifest states.

        Raises:
            StorageError: a value is missing, of another type or out of range.
        """
        growth = None
        if stored.has("growth"):
            numbers = stored.numbers("growth", SCALES[0], MAX_POSITIONS)
            if len(numbers) != 2 or numbers[1] < 1:
                raise stored.wrong("growth", numbers, "a factor and a number of positions")
            growth = (numbers[0], int(numbers[1]))
        return RelativeLogits(
            stored.integer("rank", 1, MAX_SIZE), stored.integer("extent", 1, MAX_POSITIONS), growth
        )

    def to_json(self) -> Mapping[str, object]:
        """Return what `from_json` reads."""
        own = {} if self.growth is None else {"growth": list(self.growth)}
        return {"rank": self.rank, "extent": self.extent, **own}


def by_keys(by_distance_HSE: Tensor, num_keys: int) -> Tensor:
    """Return the terms [..., H, S, P] of all keys of the last S positions, from those by distance [..., H, S,
    E]: 0 for keys that are further back, and for those after the query."""
    num_queries, extent = by_distance_HSE.shape[-2:]
    positions = torch.arange(num_keys, device=by_distance_HSE.device)
    distance_SP = positions[num_keys - num_queries :].unsqueeze(1) - positions
    index_HSP = distance_SP.clamp(0, extent - 1).expand(*by_distance_HSE.shape[:-2], -1, -1)
    outside_SP = (distance_SP < 0) | (distance_SP >= extent)
    return by_distance_HSE.gather(-1, index_HSP).masked_fill(outside_SP, 0)
