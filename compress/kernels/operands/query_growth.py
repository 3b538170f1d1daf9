"""The parameters by which the queries of an indexer grow with their position (`models/query_growth.py`).

Shapes: T rows, H heads, L positions.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.models.query_growth import growth_of_logs


@dataclass(frozen=True)
class QueryGrowth:
    """The logarithms [L] of all positions (`position_logs`) and the scale and base of each head [2, H], all
    in the dtype of the model."""

    logs_L: Tensor
    heads_2H: Tensor

    def of(self, positions_T: Tensor) -> Tensor:
        """Return the factor [T, H] of each head of the queries at these positions."""
        scale_H, base_H = self.heads_2H
        return growth_of_logs(scale_H, base_H, self.logs_L[positions_T])
