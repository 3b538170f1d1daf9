"""The blocks of keys that the rows of a pass attend to, where indexers choose some
(`models/block_choice.py`).

The keys and values of the chosen blocks are gathered, those of each KV head or the same of all, in rising
order into pages of the row's own, which decode attention reads like those of a sequence of so many positions.
So the bits of a row that sees no more positions than are chosen are those of attention without an indexer,
and every kernel of that serves.

Shapes: T rows, N heads of the indexer, I dimensions of a head, C head dimension of attention, H heads.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.paged import PagedKV
from compress.models.arch import Arch
from compress.models.block_choice import num_attended, rotate_first
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import LayerShape, Rope
from compress.runtime.block_linears import BlockLinears, BlockRows
from compress.runtime.deployment import Deployment
from compress.runtime.key_choice import KeyChoice
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.row_contexts import RowContexts, rows_at_once

Tables = tuple[Tensor, Tensor]
"""Cos and sin of all positions [L, C]."""
DecodeAttention = Callable[..., Tensor]
"""(queries [T, H, C], pages, blocks [T, B], context lengths [T], q_len=1) -> [T, H, C]."""


class BlockChoice(KeyChoice[BlockIndexer]):
    """The indexers of blocks of the layers of one architecture, in sequences of the length that a deployment
    has. `rope_tables` hold cos and sin of all positions by rope and head dimension.

    Raises:
        EnvironmentUnfit: no kernel here serves their choice.
    """

    def __init__(
        self, arch: Arch, deployment: Deployment, rope_tables: Mapping[tuple[Rope | None, int], Tables]
    ) -> None:
        super().__init__("block_choice", BlockIndexer, arch, deployment)
        self._rope_tables = rope_tables

    def store(self, shape: LayerShape, index: BlockRows, positions_T: Tensor, slots_T: Tensor) -> None:
        """Write the keys of an indexer to their pages, rotated where blocks are not pooled."""
        assert shape.block_indexer is not None
        k_TI = index.k_TI
        if not shape.block_indexer.pooled:
            k_TI = self._turned(shape, k_TI.unsqueeze(1), positions_T).squeeze(1)
        index.pages.write_(slots_T, k_TI)

    def attended(
        self,
        layer: LayerWeights,
        q_THC: Tensor,
        kv: PagedKV,
        index: BlockRows,
        positions_T: Tensor,
        rows: RowContexts,
        attention: DecodeAttention,
    ) -> Tensor:
        """Return attention [T, H, C] of rows to the blocks that the indexer of the layer chooses for them;
        `q_THC`, `index` and `positions_T` are theirs. The cache has their keys and values, and index keys."""
        assert isinstance(layer.indexer, BlockLinears)
        facts = layer.indexer.facts
        keys = BlockKeys(
            facts, layer.indexer.k_norm.norm, layer.shape.turning_dim, *self._tables(layer.shape)
        )
        q_TNI = self._turned(layer.shape, index.q_TNI, positions_T)
        lens_T = num_attended(facts, (rows.ends_T - 1).clamp(min=0))
        at_once = rows_at_once(kv, facts.top_k)
        parts = []
        for start in range(0, len(rows), at_once):
            own = slice(start, start + at_once)
            part = rows.part(own)
            slots_TNK = self._kernels[facts].kernel.fn(
                q_TNI[own], keys, index.pages, part.table_TB, part.ends_T
            )
            pages, where = part.of_heads(kv, slots_TNK, lens_T[own])
            parts.append(attention(q_THC[own], pages, where.table_TB, where.ends_T, q_len=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tables(self, shape: LayerShape) -> Tables:
        return self._rope_tables[shape.rope, shape.head_dim]

    def _turned(self, shape: LayerShape, x_TNI: Tensor, positions_T: Tensor) -> Tensor:
        cos_LC, sin_LC = self._tables(shape)
        positions_T = positions_T.long().clamp(0, len(cos_LC) - 1)
        return rotate_first(x_TNI, cos_LC[positions_T], sin_LC[positions_T], shape.turning_dim)
