"""The choice of latents that the rows of a pass attend to, where indexers choose some (`models/indexer.py`).

A row attends to the positions that the indexer of its layer has chosen, or that of the last layer before with
one: their latents are gathered in rising order into pages of the row's own, which decode attention reads like
those of a sequence of so many positions. So the bits of a row that sees no more positions than are chosen are
those of attention without an indexer, and every kernel of that serves.

Shapes: T rows, R sequences, B blocks of the longest sequence, K positions chosen, W numbers of a position.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.models.arch import Arch
from compress.models.choices import choice_sources
from compress.models.indexer import Indexer
from compress.models.layer_shape import Rope
from compress.models.query_growth import learned_growth
from compress.models.token_indexer import turned
from compress.runtime.deployment import Deployment
from compress.runtime.index_linears import IndexLinears, IndexRows
from compress.runtime.key_choice import KeyChoice
from compress.runtime.latent_linears import latent_of
from compress.runtime.layer_attention import Projected
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.row_contexts import RowContexts

Tables = tuple[Tensor, Tensor]
"""Cos and sin of all positions [L, R]."""


@dataclass(frozen=True)
class Chosen:
    """The slots [T, K] that rows attend to, the first `lens_T` of each."""

    slots_TK: Tensor
    lens_T: Tensor


@dataclass
class Choices:
    """The rows of a pass, and the slots that they attend to in the last layer that has an indexer, None where
    these are all, or no later layer reads them."""

    rows: RowContexts
    last: Chosen | None = None


class LatentChoice(KeyChoice[Indexer]):
    """The indexers of the layers of one architecture, in sequences of the length that a deployment has.
    `rope_tables` hold cos and sin of all positions by rope and width.

    Raises:
        EnvironmentUnfit: no kernel here serves their choice.
    """

    def __init__(
        self, arch: Arch, deployment: Deployment, rope_tables: Mapping[tuple[Rope | None, int], Tables]
    ) -> None:
        super().__init__("index_choice", Indexer, arch, deployment)
        self._rope_tables = rope_tables
        self._shares = bool(choice_sources(arch))

    def store(self, layer: LayerWeights, projected: Projected, index: IndexRows) -> None:
        """Write the keys of an indexer to their pages, rotated."""
        k_TI = self._turned(layer, index.k_TI.unsqueeze(1), projected.positions_T).squeeze(1)
        index.pages.write_(projected.slots_T, k_TI)

    def slots(
        self, layer: LayerWeights, projected: Projected, choices: Choices | None, rows: slice
    ) -> Chosen | None:
        """Return the slots that some rows of `projected` attend to, which are those of `choices`; None where
        they attend to all positions that they see. The cache has their index keys."""
        if choices is None or layer.shape.window is not None:
            return None
        facts = latent_of(layer.shape).indexer
        if facts is None:
            return choices.last
        choices.last = None
        index = projected.index
        if (
            not isinstance(index, IndexRows)
            or choices.rows.table_TB.shape[1] * index.pages.block_size <= facts.top_k
        ):
            return None
        q_THI = index.q_THI[rows]
        positions_T = projected.positions_T[rows]
        assert isinstance(layer.indexer, IndexLinears)
        if layer.indexer.growth_2H is not None:
            scale_H, base_H = layer.indexer.growth_2H
            growth_TH = learned_growth(scale_H, base_H, positions_T, q_THI.dtype)
            q_THI = q_THI * growth_TH.unsqueeze(-1)
        pools = layer.indexer.pools
        how = {"top_k": facts.top_k} if pools is None else {"pools": pools}
        slots_TK: Tensor = self._kernels[facts].kernel.fn(
            self._turned(layer, q_THI, positions_T),
            index.weights_TH[rows],
            index.pages,
            choices.rows.table_TB,
            choices.rows.ends_T,
            **how,
        )
        chosen = Chosen(slots_TK, facts.num_chosen(choices.rows.ends_T))
        choices.last = chosen if self._shares else None
        return chosen

    def _turned(self, layer: LayerWeights, x_THI: Tensor, positions_T: Tensor) -> Tensor:
        latent = latent_of(layer.shape)
        assert latent.indexer is not None
        if layer.shape.rope is None:
            return x_THI
        tables = self._rope_tables[layer.shape.rope, latent.rope_dim]
        cos_TR, sin_TR = (each[positions_T] for each in tables)
        return turned(latent.indexer, x_THI, cos_TR, sin_TR)
