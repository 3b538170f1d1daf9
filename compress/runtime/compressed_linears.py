"""The linears of compressed attention (`models/compressed.py`) that follow the one by which a layer reads the
stream, and its compressor, with the kernels chosen for them.

Shapes: T rows, C head dimension, F numbers of a row that entries are computed of.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.compressed import EntryWeights
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.compressed import COMPRESSOR, POSITIONS, Compressed
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear, Rows
from compress.runtime.fusing import fuse
from compress.runtime.latent_linears import NormedLinear


@dataclass(frozen=True)
class CompressedLinears:
    """The linears of the compressed attention of one layer: `q_up`, those of the groups of heads, and the
    compressor with the parameters of entries, None where the layer has none."""

    facts: Compressed
    head_dim: int
    q_up: NormedLinear
    kv_norm: RowNorm
    o_down: tuple[FusedLinear, ...]
    compressor: FusedLinear | None
    entries: EntryWeights | None

    @staticmethod
    def of(shape: LayerShape, weights: Weights, eps: float, deployment: Deployment) -> "CompressedLinears":
        """Return the linears of a layer; `eps` is that of the norms."""
        facts = shape.compressed
        assert facts is not None

        def norm(name: str) -> RowNorm:
            return RowNorm(deployment.placed(dense(weights[f"attn.{name}.weight"])), eps)

        entries = None
        if facts.rate:
            positions = dense(weights[POSITIONS]).to(device=deployment.device, dtype=torch.float32)
            entries = EntryWeights(facts, positions, norm("compressor.norm"))
        return CompressedLinears(
            facts,
            shape.head_dim,
            NormedLinear(norm("q_latent_norm"), fuse(("attn.q_up",), weights, deployment)),
            norm("kv_norm"),
            tuple(fuse((name,), weights, deployment) for name in facts.out_linears),
            fuse(COMPRESSOR, weights, deployment) if facts.rate else None,
            entries,
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The linears in execution order."""
        first = () if self.compressor is None else (self.compressor,)
        return (*first, self.q_up.linear, *self.o_down)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        own = 0 if self.entries is None else self.entries.weight_bytes
        return own + sum(each.weight_bytes for each in self.fused_linears)

    def raw(self, rows: Rows, phase: Phase) -> Tensor | None:
        """Return the numbers [T, F] that entries are computed of, None in layers without entries."""
        return None if self.compressor is None else self.compressor(rows, phase)

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
    shape: LayerShape, weights: Weights, eps: float, deployment: Deployment
) -> CompressedLinears | None:
    """Return the linears of the compressed attention of a layer, None where it has another."""
    return None if shape.compressed is None else CompressedLinears.of(shape, weights, eps, deployment)
