"""The linears of compressed attention (`models/compressed.py`) that follow the one by which a layer reads the
stream, its compressor, and the linears of its indexer (`models/chosen_keys.py`), with the kernels chosen for
them.

Shapes: T rows, C head dimension, F numbers of a row that entries are computed of, N heads of an indexer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.compressed import COMPRESSOR, Compressed
from compress.models.indexer import EntryIndexer
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear, Rows
from compress.runtime.fusing import fuse
from compress.runtime.latent_linears import NormedLinear, RmsNorm

_OF_STREAM = ("attn.indexer.kv", "attn.indexer.gate", "attn.indexer.weights")
"""The linears by which an indexer reads the stream: its compressor, and the weights of its heads."""


@dataclass(frozen=True)
class IndexerLinears:
    """The linears of the indexer of a layer: those that read the stream, as one, and that of its queries,
    with the parameters of the entries that it scores."""

    widths: EntryIndexer
    of_stream: FusedLinear
    q: NormedLinear
    entries: EntryWeights

    def choice(self, latent_TF: Tensor, weights_TN: Tensor, phase: Phase, rms_norm: RmsNorm) -> EntryChoice:
        """Return what chooses the entries of rows, by the latents of their queries and the outputs of the
        linear of the weights of heads."""
        q_TNI = self.q(latent_TF, phase, rms_norm).unflatten(1, (-1, self.widths.head_dim))
        factors_TN = weights_TN.to(torch.float32) * self.widths.score_scale
        return EntryChoice(self.entries, self.widths.top_entries, q_TNI, factors_TN)


@dataclass(frozen=True)
class CompressedLinears:
    """The linears of the compressed attention of one layer: `q_up`, those of the groups of heads, and the
    compressor with the parameters of entries, None where the layer has none, as is its indexer."""

    facts: Compressed
    head_dim: int
    q_up: NormedLinear
    kv_norm: RowNorm
    o_down: tuple[FusedLinear, ...]
    compressor: FusedLinear | None
    entries: EntryWeights | None
    indexer: IndexerLinears | None = None

    @staticmethod
    def of(arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment) -> "CompressedLinears":
        """Return the linears of a layer, without those of its indexer where sequences are so short that it
        would choose every entry."""
        facts = shape.compressed
        assert facts is not None

        def norm(name: str) -> RowNorm:
            return RowNorm(deployment.placed(dense(weights[f"attn.{name}.weight"])), arch.norm_eps)

        def entries(module: str) -> EntryWeights:
            positions = dense(weights[f"attn.{module}.positions"])
            placed = positions.to(device=deployment.device, dtype=torch.float32)
            return EntryWeights(facts, placed, norm(f"{module}.norm"))

        def normed(name: str) -> NormedLinear:
            return NormedLinear(norm("q_latent_norm"), fuse((name,), weights, deployment))

        indexer = None
        if facts.indexer is not None and shape.index_numbers(deployment.num_positions(arch)):
            of_stream = fuse(_OF_STREAM, weights, deployment)
            indexer = IndexerLinears(facts.indexer, of_stream, normed("attn.indexer.q"), entries("indexer"))
        return CompressedLinears(
            facts,
            shape.head_dim,
            normed("attn.q_up"),
            norm("kv_norm"),
            tuple(fuse((name,), weights, deployment) for name in facts.out_linears),
            fuse(COMPRESSOR, weights, deployment) if facts.rate else None,
            entries("compressor") if facts.rate else None,
            indexer,
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The linears in execution order."""
        first = () if self.compressor is None else (self.compressor,)
        if self.indexer is not None:
            first = (*first, self.indexer.of_stream, self.indexer.q.linear)
        return (*first, self.q_up.linear, *self.o_down)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        of_indexer = None if self.indexer is None else self.indexer.entries
        own = sum(each.weight_bytes for each in (self.entries, of_indexer) if each is not None)
        return own + sum(each.weight_bytes for each in self.fused_linears)

    def raw(self, rows: Rows, phase: Phase) -> Tensor | None:
        """Return the numbers [T, F] that entries are computed of, and after them those of the entries that
        an indexer scores, and the weights of its heads; None in layers without entries."""
        if self.compressor is None:
            return None
        raw_TF = self.compressor(rows, phase)
        if self.indexer is None:
            return raw_TF
        return torch.cat((raw_TF, self.indexer.of_stream(rows, phase)), dim=1)

    def cached(self, raw_TF: Tensor | None) -> Tensor | None:
        """Return the numbers of `raw` that the cache stores."""
        if raw_TF is None or self.indexer is None:
            return raw_TF
        return raw_TF[:, : -self.indexer.widths.num_heads]

    def choice(
        self, latent_TF: Tensor, raw_TF: Tensor | None, phase: Phase, rms_norm: RmsNorm
    ) -> EntryChoice | None:
        """Return what chooses the entries of rows, None where they attend to all that they see."""
        if self.indexer is None or raw_TF is None:
            return None
        weights_TN = raw_TF[:, -self.indexer.widths.num_heads :]
        return self.indexer.choice(latent_TF, weights_TN, phase, rms_norm)

    def split(self, first_TF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents of queries, and the keys [T, C], that the first linear leaves side by side."""
        latent_TF, k_TC = first_TF.split([first_TF.shape[1] - self.head_dim, self.head_dim], dim=1)
        return latent_TF, k_TC

    def grouped(self, attended_THC: Tensor, phase: Phase) -> Tensor:
        """Return the outputs [T, F] of the linears of the groups of heads, side by side."""
        groups = attended_THC.flatten(1).chunk(self.facts.out_groups, dim=1)
        parts = [
            linear(group_TF.contiguous(), phase) for linear, group_TF in zip(self.o_down, groups, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self.fused_linears for row in each.report(layer_idx)]


def compressed_linears(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> CompressedLinears | None:
    """Return the linears of the compressed attention of a layer, None where it has another."""
    return None if shape.compressed is None else CompressedLinears.of(arch, shape, weights, deployment)
