"""The linears and norms of an indexer of latent attention in serving (`models/indexer.py`), with the kernels
chosen for them. They are dense in every scheme.

Shapes: T rows, D hidden, F outputs of a linear, H heads of the indexer, I numbers of a key.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.key_pools import KeyPools
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.indexer import POOL_GATE, POOL_POSITIONS, Indexer
from compress.models.latent import Q_NORM
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, FusedLinear
from compress.runtime.fusing import fuse_padded
from compress.runtime.latent_linears import BoundNorm

_PREFIX = "attn.indexer"


@dataclass(frozen=True)
class IndexRows:
    """The outputs of the linears of an indexer, as its kernels read them: queries [T, H I], keys [T, I] and
    weights of heads, float32 [T, H], with the pages of its keys. With pools, `gate_TI` is what the weights of
    positions are computed of."""

    q_TF: Tensor
    k_TI: Tensor
    weights_TH: Tensor
    pages: PagedLatents
    gate_TI: Tensor | None = None


@dataclass(frozen=True)
class IndexLinears:
    """The linears of an indexer, the norm of the input of its queries with a kernel, and that of its keys,
    which are normed where they are stored. `growth_2H` are the parameters by which queries grow, None where
    they do not; `gate` and `pools` are those of an indexer with pools, and None in others."""

    facts: Indexer
    q_norm: BoundNorm
    q: FusedLinear
    k: FusedLinear
    k_norm: RowNorm
    weights: FusedLinear
    growth_2H: Tensor | None
    gate: FusedLinear | None = None
    pools: KeyPools | None = None

    def of_rows(self, rows_TD: Tensor, first_TF: Tensor, pages: PagedLatents, phase: Phase) -> IndexRows:
        """Return what it computes of the input of attention and of what the first linear of the layer leaves:
        the latents of queries come first in it."""
        read_TF = rows_TD if self.facts.of_stream else first_TF[:, : len(self.q_norm.norm.weight)]
        num_heads = self.facts.num_heads
        head_dim = self.facts.head_dim
        return IndexRows(
            self.q(self.q_norm(read_TF), phase)[:, : num_heads * head_dim],
            self.k(rows_TD, phase)[:, :head_dim],
            self.weights(rows_TD, phase, out_dtype=torch.float32)[:, :num_heads],
            pages,
            None if self.gate is None else self.gate(rows_TD, phase)[:, :head_dim],
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The linears in execution order."""
        return (
            (self.q, self.k, self.weights) if self.gate is None else (self.q, self.k, self.gate, self.weights)
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        return sum(each.weight_bytes for each in self.fused_linears)

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self.fused_linears for row in each.report(layer_idx)]


def index_linears(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> IndexLinears | None:
    """Return the linears of the indexer of a layer with latents, None where it has none, or where sequences
    are so short that it would choose every key."""
    if shape.latent is None or not shape.index_numbers(deployment.num_positions(arch)):
        return None
    facts = shape.latent.indexer
    assert facts is not None

    def linear(name: str) -> FusedLinear:
        name = f"{_PREFIX}.{name}"
        return fuse_padded(name, dense(weights[f"{name}.weight"]), deployment)

    gate = None
    pools = None
    if facts.pool_size:
        gate = fuse_padded(POOL_GATE, dense(weights[POOL_GATE]), deployment)
        placed = dense(weights[POOL_POSITIONS]).to(deployment.device, torch.float32)
        pools = KeyPools(facts, placed)

    def bound(norm: RowNorm) -> BoundNorm:
        problem = deployment.kernel_device.problem("rms_norm", n=len(norm.weight))
        return BoundNorm(norm, BoundKernel.of(problem))

    def layer_norm(name: str) -> RowNorm:
        weight, bias = (
            dense(weights[f"{_PREFIX}.{name}.{each}"]).to(deployment.device, torch.float32)
            for each in ("weight", "bias")
        )
        return RowNorm(weight, facts.norm_eps, centered=True, bias=bias)

    growth_2H = None
    if facts.of_stream:
        stored = [dense(weights[f"{_PREFIX}.growth_{each}"]) for each in ("scale", "base")]
        growth_2H = deployment.placed(torch.stack(stored))
        q_norm = bound(layer_norm("q_norm"))
    else:
        weight = deployment.placed(dense(weights[f"{Q_NORM}.weight"]))
        scale = shape.latent.scale_of(Q_NORM, arch.hidden_size)
        own = weight if scale == 1 else weight.to(torch.float32) * scale
        q_norm = bound(RowNorm(own, arch.latent_eps))
    return IndexLinears(
        facts,
        q_norm,
        linear("q"),
        linear("k"),
        layer_norm("k_norm"),
        linear("weights"),
        growth_2H,
        gate,
        pools,
    )
