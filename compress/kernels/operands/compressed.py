"""The parameters by which kernels of compressed attention compute the entries of a layer
(`models/compressed.py`)."""

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
