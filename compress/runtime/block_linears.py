"""The linear and the norms of an indexer that chooses blocks, in serving (`models/block_choice.py`), with the
kernels chosen for them. They are dense in every scheme.

Shapes: T rows, D hidden, N heads of the indexer, I dimensions of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear
from compress.runtime.fusing import fuse_padded
from compress.runtime.latent_linears import BoundNorm

_QUERY = "attn.indexer.q"
_KEY = "attn.indexer.k"


@dataclass(frozen=True)
class BlockRows:
    """The queries [T, N, I], normed, and the keys [T, I], normed unless blocks are pooled, that an indexer of
    blocks computes of rows; both are not rotated. Its keys have pages."""

    q_TNI: Tensor
    k_TI: Tensor
    pages: PagedLatents

    def of(self, rows: slice) -> "BlockRows":
        """Return those of some rows."""
        return BlockRows(self.q_TNI[rows], self.k_TI[rows], self.pages)


@dataclass(frozen=True)
class BlockLinears:
    """The linear of the queries and keys of an indexer, side by side, and the norms of both."""

    facts: BlockIndexer
    linear: FusedLinear
    q_norm: BoundNorm
    k_norm: BoundNorm

    def of_rows(self, rows_TD: Tensor, first_TF: Tensor, pages: PagedLatents, phase: Phase) -> BlockRows:
        """Return what it computes of the input of attention; it reads nothing that other linears leave."""
        del first_TF
        num_heads = self.facts.num_heads
        head_dim = self.facts.head_dim
        sizes = [num_heads * head_dim, head_dim]
        both_TF = self.linear(rows_TD, phase)[:, : sum(sizes)]
        q_TF, k_TI = (each.contiguous() for each in both_TF.split(sizes, dim=1))
        q_XI = self.q_norm(q_TF.view(-1, head_dim))
        k_TI = k_TI if self.facts.pooled else self.k_norm(k_TI)
        return BlockRows(q_XI.view(-1, num_heads, head_dim), k_TI, pages)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        return self.linear.weight_bytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.linear.report(layer_idx)


def block_linears(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> BlockLinears | None:
    """Return the linears of the indexer of blocks of a layer, None where it has none, or where sequences are
    so short that it would choose every block."""
    facts = shape.block_indexer
    if facts is None or not shape.index_numbers(deployment.num_positions(arch)):
        return None

    def norm(name: str) -> BoundNorm:
        weight = deployment.placed(dense(weights[f"{name}_norm.weight"])).to(torch.float32)
        problem = deployment.kernel_device.problem("rms_norm", n=len(weight))
        return BoundNorm(RowNorm(weight + arch.norm_offset, arch.norm_eps), BoundKernel.of(problem))

    stacked = torch.cat([dense(weights[f"{name}.weight"]) for name in (_QUERY, _KEY)])
    linear = fuse_padded(f"{_QUERY}+{_KEY}", stacked, deployment)
    return BlockLinears(facts, linear, norm(_QUERY), norm(_KEY))
