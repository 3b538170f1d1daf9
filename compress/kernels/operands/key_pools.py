"""The parameters by which kernels compute the keys of the pools of an indexer (`models/key_pools.py`)."""

from dataclasses import dataclass

from torch import Tensor

from compress.models.indexer import Indexer


@dataclass(frozen=True)
class KeyPools:
    """The facts of an indexer with pools, and what is added to the logits of the weights by the place of a
    position in its pool, float32 [n, I]."""

    facts: Indexer
    positions_nI: Tensor
