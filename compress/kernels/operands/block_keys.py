"""The parameters by which kernels compute the keys of blocks of an indexer (`models/block_choice.py`)."""

from dataclasses import dataclass

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.models.indexer import BlockIndexer


@dataclass(frozen=True)
class BlockKeys:
    """The facts of an indexer, the norm of its keys, the dimensions of a head that rotate, and cos and sin of
    all positions [L, C] of heads of attention."""

    facts: BlockIndexer
    norm: RowNorm
    rotary_dim: int
    cos_LC: Tensor
    sin_LC: Tensor
