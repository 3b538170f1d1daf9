"""The parameters by which kernels of compressed attention compute the entries of a layer
(`models/compressed.py`), and those by which they choose some of them (`models/chosen_keys.py`).

Shapes: T rows, N heads and I head dimension of an indexer.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.compressed import Compressed


@dataclass(frozen=True)
class EntryWeights:
    """The parameter of the places of positions among those of an entry, float32, and the norm of entries."""

    facts: Compressed
    positions: Tensor
    norm: RowNorm

    @property
    def weight_bytes(self) -> int:
        """The bytes that a step reads."""
        return sum(each.numel() * each.element_size() for each in (self.positions, self.norm.weight))

    @property
    def raw_width(self) -> int:
        """The numbers of a position that entries are computed of."""
        return self.facts.raw_width(len(self.norm.weight))


@dataclass(frozen=True)
class EntryChoice:
    """The choice of at most `top_entries` entries for each row. It has the parameters of the entries that are
    scored, whose numbers follow those of the others in the cache, the queries [T, N, I] of the rows, which
    are not turned yet, and the factors of their heads, float32 [T, N]."""

    weights: EntryWeights
    top_entries: int
    q_TNI: Tensor
    factors_TN: Tensor
