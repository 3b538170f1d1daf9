"""The choice of latents that the rows of a pass attend to, where indexers choose some (`models/indexer.py`).

A row attends to the positions that the indexer of its layer has chosen, or that of the last layer before with
one: their latents are gathered in rising order into pages of the row's own, which decode attention reads like
those of a sequence of so many positions. So the bits of a row that sees no more positions than are chosen are
those of attention without an indexer, and every kernel of that serves.

Shapes: T rows, B blocks of the longest sequence, K positions chosen, W numbers of a position, H heads of an
indexer, I numbers of a key, L positions, P dimensions that rotate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.models.arch import Arch
from compress.models.choices import choice_sources
from compress.models.indexer import Indexer
from compress.models.layer_shape import LayerShape, Rope
from compress.models.query_growth import position_logs
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel
from compress.runtime.index_linears import IndexLinears, IndexRows
from compress.runtime.key_choice import KeyChoice
from compress.runtime.latent_linears import latent_of
from compress.runtime.layer_attention import Projected
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.row_contexts import RowContexts

Tables = tuple[Tensor, Tensor]
"""Cos and sin of all positions [L, P]."""


@dataclass(frozen=True)
class IndexQueries:
    """The queries [T, H, I] of an indexer, grown and rotated, the factors of its heads, float32 [T, H], and
    the pages of its keys."""

    q_THI: Tensor
    factors_TH: Tensor
    pages: PagedLatents


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
        self._stores: dict[tuple[Indexer, int], BoundKernel] = {}
        num_positions = deployment.num_positions(arch)
        for layer in arch.layers:
            if layer.latent is not None and layer.index_numbers(num_positions):
                facts, rope_dim = _store_key(layer)
                problem = deployment.kernel_device.problem("index_store", n=facts.head_dim, k=rope_dim)
                self._stores[facts, rope_dim] = BoundKernel.of(problem)
        self._logs_L: Tensor | None = None
        if any(facts.of_stream for facts, _ in self._stores):
            longest = max(len(cos_LP) for cos_LP, _ in rope_tables.values())
            positions = torch.arange(longest, device=deployment.device)
            self._logs_L = position_logs(positions, deployment.dtype)

    def store(self, layer: LayerWeights, projected: Projected) -> IndexQueries | None:
        """Write the keys of the indexer of a layer to their pages; return its queries, None where the layer
        has no indexer."""
        index = projected.index
        if not isinstance(index, IndexRows):
            return None
        assert isinstance(layer.indexer, IndexLinears)
        growth = None
        if layer.indexer.growth_2H is not None:
            assert self._logs_L is not None
            growth = QueryGrowth(self._logs_L, layer.indexer.growth_2H)
        facts, rope_dim = _store_key(layer.shape)
        cos_LP, sin_LP = self._rope_tables[layer.shape.rope, rope_dim]
        rotates = slice(rope_dim if layer.shape.rope is not None else 0)
        q_THI, factors_TH = self._stores[facts, rope_dim].kernel.fn(
            index.q_TF,
            index.k_TI,
            index.weights_TH,
            layer.indexer.k_norm,
            cos_LP[:, rotates],
            sin_LP[:, rotates],
            projected.positions_T,
            projected.slots_T,
            index.pages,
            facts=facts,
            gate_TI=index.gate_TI,
            growth=growth,
        )
        return IndexQueries(q_THI, factors_TH, index.pages)

    def slots(
        self, layer: LayerWeights, index: IndexQueries | None, choices: Choices | None, rows: slice
    ) -> Chosen | None:
        """Return the slots that some rows of a pass attend to, which are those of `choices`; None where they
        attend to all positions that they see. `index` is what `store` returned."""
        if choices is None or layer.shape.window is not None:
            return None
        facts = latent_of(layer.shape).indexer
        if facts is None:
            return choices.last
        choices.last = None
        if index is None or choices.rows.table_TB.shape[1] * index.pages.block_size <= facts.top_k:
            return None
        assert isinstance(layer.indexer, IndexLinears)
        pools = layer.indexer.pools
        how = {"top_k": facts.top_k} if pools is None else {"pools": pools}
        slots_TK: Tensor = self._kernels[facts].kernel.fn(
            index.q_THI[rows],
            index.factors_TH[rows],
            index.pages,
            choices.rows.table_TB,
            choices.rows.ends_T,
            **how,
        )
        chosen = Chosen(slots_TK, facts.num_chosen(choices.rows.ends_T))
        choices.last = chosen if self._shares else None
        return chosen

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        stores = [each.report(layer=None, linear=each.problem.op) for each in self._stores.values()]
        return stores + super().kernel_report()


def _store_key(layer: LayerShape) -> tuple[Indexer, int]:
    """Return the facts by which the kernel is selected that stores the keys of a layer's indexer: the indexer
    and the dimensions of the layer's rope."""
    latent = latent_of(layer)
    assert latent.indexer is not None
    return latent.indexer, latent.rope_dim
