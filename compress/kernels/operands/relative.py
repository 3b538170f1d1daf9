"""The operand of relative logits (`models/relative_logits.py`): what a query adds to its scores by how far
back a key is, and the factor of its scores.

Shapes: T rows, H heads, R numbers of a head, E distances.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativeTerm:
    """The numbers of each head of the rows of a pass [T, H, R], the profiles over distance [R, E], and the
    factor of the scores of each row [T], None where it is 1; all of them float32."""

    states_THR: Tensor
    profiles_RE: Tensor
    growth_T: Tensor | None = None

    def rows(self, start: int, stop: int) -> "RelativeTerm":
        """Return the operand of some of the rows."""
        growth_T = None if self.growth_T is None else self.growth_T[start:stop]
        return RelativeTerm(self.states_THR[start:stop], self.profiles_RE, growth_T)

    def by_distance(self) -> Tensor:
        """Return the terms of keys by distance [T, H, E]. They are added one profile at a time, because the
        order of summation of a product of the library would depend on the number of rows."""
        total_THE = self.states_THR[..., :1] * self.profiles_RE[0]
        for idx in range(1, len(self.profiles_RE)):
            total_THE = total_THE + self.states_THR[..., idx : idx + 1] * self.profiles_RE[idx]
        return total_THE

    def grown(self, scores: Tensor, row_dim: int) -> Tensor:
        """Return scores, of which a dimension is that of the rows, times the factors of their rows."""
        if self.growth_T is None:
            return scores
        shape = [1] * scores.dim()
        shape[row_dim] = -1
        return scores * self.growth_T.view(shape).to(torch.float32)
