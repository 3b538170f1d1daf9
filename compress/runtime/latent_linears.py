"""The linears of latent attention (arXiv 2405.04434) between the one by which a layer reads the stream and
the rotation of heads, with the kernels chosen for them.

Shapes: T rows, F outputs of a linear, H heads, C head dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.latent import LATENT_EPS, Latent
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear

RowKernel = Callable[..., Any]
"""A kernel of `rms_norm` or `latent_heads` (`kernels/select.py`)."""


@dataclass(frozen=True)
class NormedLinear:
    """A linear and the norm of the latent that it reads."""

    norm: RowNorm
    linear: FusedLinear

    def __call__(self, latent_TF: Tensor, phase: Phase, rms_norm: RowKernel) -> Tensor:
        """Return the outputs [T, F] of the linear."""
        return self.linear(rms_norm(latent_TF, self.norm.weight, self.norm.eps, self.linear.quant), phase)


@dataclass(frozen=True)
class LatentLinears:
    """The linears of the latents of one layer; `q_up` is None where queries have no latent."""

    facts: Latent
    head_dim: int
    q_up: NormedLinear | None
    kv_up: NormedLinear

    @staticmethod
    def of(
        shape: LayerShape, fused: Mapping[str, FusedLinear], weights: Weights, deployment: Deployment
    ) -> "LatentLinears":
        """Return the linears of a layer, of those fused by group."""
        assert shape.latent is not None

        def normed(name: str) -> NormedLinear:
            weight = deployment.placed(dense(weights[f"attn.{name}_latent_norm.weight"]))
            return NormedLinear(RowNorm(weight, LATENT_EPS), fused[f"{name}_up"])

        return LatentLinears(
            shape.latent,
            shape.head_dim,
            normed("q") if shape.latent.q_rank else None,
            normed("kv"),
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The linears in execution order."""
        own = () if self.q_up is None else (self.q_up.linear,)
        return *own, self.kv_up.linear

    def __call__(
        self, first_TF: Tensor, phase: Phase, *, rms_norm: RowKernel, latent_heads: RowKernel
    ) -> Tensor:
        """Return queries, keys and values side by side [T, 3 H C] of the latents, or of the queries and the
        latent of keys and values, that the first linear leaves, with the kernels of these two ops."""
        facts = self.facts
        widths = [first_TF.shape[1] - facts.kv_rank - facts.rope_dim, facts.kv_rank, facts.rope_dim]
        q_TF, latent_TF, rotated_TC = first_TF.split(widths, dim=1)
        if self.q_up is not None:
            q_TF = self.q_up(q_TF, phase, rms_norm)
        kv_TF = self.kv_up(latent_TF, phase, rms_norm)
        heads_TF: Tensor = latent_heads(q_TF, kv_TF, rotated_TC, facts, self.head_dim)
        return heads_TF
