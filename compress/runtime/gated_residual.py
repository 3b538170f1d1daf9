"""Gated residuals in serving (`models/gated_residual.py`): operations of torch, which a CUDA graph can
capture and whose bits of a row do not depend on the other rows, around the kernels of linears. The output of
a half-layer is added to the streams by the kernel of hyper-connections.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of the gates.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.problem import Phase
from compress.kernels.rms_norm.reference import rms_norm
from compress.models.arch import Arch
from compress.models.gated_residual import GatedResiduals, gated_mean, gates_of, injections_of
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse, fuse_padded


@dataclass(frozen=True)
class GatedResidualWeights:
    """The gated residual of a half-layer, or that of the head, which has no `inject`. `norm_E` are the
    factors of the normed streams, float32."""

    facts: GatedResiduals
    norm_E: Tensor
    norm_eps: float
    down: FusedLinear
    up: FusedLinear
    inject: FusedLinear | None

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """The linears, which stay dense."""
        return tuple(each for each in (self.down, self.up, self.inject) if each is not None)

    @property
    def weight_bytes(self) -> int:
        """The bytes that a step reads."""
        return sum(each.weight_bytes for each in self.linears) + self.norm_E.nbytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self.linears for row in each.report(layer_idx)]

    def enter(self, streams_TE: Tensor, phase: Phase) -> tuple[Tensor, Tensor | None]:
        """Return the mixture of the streams [T, D], and the factors by which the output of the half-layer is
        added to each stream, float32 [T, n]; None for the head."""
        n = self.facts.num_streams
        normed_TE = normed_streams(streams_TE, self.norm_E, n, self.norm_eps)
        low_TR = self.down(normed_TE, phase, out_dtype=torch.float32)
        low_TR = in_whole_vectors(partial(gates_of, num_streams=n), low_TR).to(streams_TE.dtype)
        gates_TE = in_whole_vectors(torch.sigmoid, self.up(low_TR, phase, out_dtype=torch.float32))
        mixed_TD = gated_mean(normed_TE.to(torch.float32), gates_TE, n).to(streams_TE.dtype)
        if self.inject is None:
            return mixed_TD, None
        inject_Tn = self.inject(normed_TE, phase, out_dtype=torch.float32)[:, :n]
        return mixed_TD, in_whole_vectors(partial(injections_of, num_streams=n), inject_Tn).contiguous()


def normed_streams(streams_TE: Tensor, factors_E: Tensor, num_streams: int, eps: float) -> Tensor:
    """Return the streams [T, n D], each divided by its root mean square, times float32 factors."""
    by_stream = (num_streams, -1)
    return rms_norm(streams_TE.unflatten(-1, by_stream), factors_E.unflatten(0, by_stream), eps).flatten(-2)


def gated_residual_weights(
    arch: Arch, facts: GatedResiduals, weights: Weights, name: str, deployment: Deployment
) -> GatedResidualWeights:
    """Return the gated residual by its canonical name."""
    norm_E = dense(weights[f"{name}.norm.weight"]).to(device=deployment.device, dtype=torch.float32)
    inject = weights.get(f"{name}.inject.weight")
    return GatedResidualWeights(
        facts,
        norm_E + arch.norm_offset,
        arch.norm_eps,
        fuse((f"{name}.down",), weights, deployment),
        fuse((f"{name}.up",), weights, deployment),
        None if inject is None else fuse_padded(f"{name}.inject", dense(inject), deployment),
    )
