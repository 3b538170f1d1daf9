"""AltUp and LAuReL in serving (`models/altup.py`, `models/laurel.py`): operations of torch, which a CUDA
graph can capture and whose bits of a row do not depend on the other rows, around the kernels of linears and
norms.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of LAuReL, P width of an embedding for a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Phase
from compress.models.altup import corrected, first_streams, joined_streams, predicted
from compress.models.arch import Arch
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse, fuse_padded
from compress.runtime.row_norms import row_norm

Norm = Callable[[Tensor, RowNorm], Tensor]
"""(x [T, D], norm) -> x normed, in its dtype."""
LAUREL_SCALE = 2**-0.5
"""The factor of the stream after attention and LAuReL."""


@dataclass(frozen=True)
class StreamLinears:
    """The linears of the streams but the first: those by which they begin, or by which the head reads
    them."""

    linears: tuple[FusedLinear, ...]

    def first(self, x_TD: Tensor, phase: Phase) -> Tensor:
        """Return the streams [T, n D] before the first layer from the embeddings [T, D]."""
        return first_streams(x_TD, len(self.linears) + 1, lambda idx, x: self._product(idx, x, phase))

    def joined(self, streams_TE: Tensor, phase: Phase) -> Tensor:
        """Return what the norm before the head reads [T, D]."""
        return joined_streams(streams_TE, len(self.linears) + 1, lambda idx, x: self._product(idx, x, phase))

    def _product(self, idx: int, x_TD: Tensor, phase: Phase) -> Tensor:
        return self.linears[idx](x_TD, phase, out_dtype=torch.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return sum(each.weight_bytes for each in self.linears)

    def report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return [row for each in self.linears for row in each.report(None)]


def stream_linears(arch: Arch, outer: Weights, place: str, deployment: Deployment) -> StreamLinears | None:
    """Return the linears of the streams at a place outside of the layers, `embed` or `norm`; None where the
    model has no AltUp."""
    if not arch.altup_streams:
        return None
    names = [f"{place}.streams.{idx}" for idx in range(arch.altup_streams - 1)]
    return StreamLinears(tuple(fuse((name,), outer, deployment) for name in names))


@dataclass(frozen=True)
class AltUpWeights:
    """The weights of the alternating updates of a layer; those of the small products are float32."""

    norm: RowNorm
    router: FusedLinear
    predict_OI: Tensor
    correct_OI: Tensor
    scale_D: Tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return self.router.weight_bytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.router.report(layer_idx)

    def before(self, streams_TE: Tensor, norm: Norm, phase: Phase) -> tuple[Tensor, Tensor]:
        """Return the predicted streams [T, n D], and the first of them, which the layer reads."""
        size = len(self.scale_D)
        routed_Tn = self._routed(streams_TE[:, :size].contiguous(), norm, phase)
        predicted_TE = predicted(streams_TE, routed_Tn, self.predict_OI)
        return predicted_TE, predicted_TE[:, :size].contiguous()

    def after(self, predicted_TE: Tensor, y_TD: Tensor, norm: Norm, phase: Phase) -> Tensor:
        """Return the corrected streams [T, n D] from the output of the layer."""
        return corrected(predicted_TE, y_TD, self._routed(y_TD, norm, phase), self.correct_OI)

    def _routed(self, x_TD: Tensor, norm: Norm, phase: Phase) -> Tensor:
        """Return r of x, float32 [T, n]."""
        out_TO = self.router(norm(x_TD, self.norm), phase, out_dtype=torch.float32)
        return in_whole_vectors(torch.tanh, out_TO[:, : len(self.correct_OI)] * x_TD.shape[1] ** -1.0)


def altup_weights(arch: Arch, weights: Weights, deployment: Deployment) -> AltUpWeights | None:
    """Return the alternating updates of a layer, None where the model has none."""
    if not arch.altup_streams:
        return None

    def small(name: str) -> Tensor:
        return dense(weights[f"altup.{name}.weight"]).to(device=deployment.device, dtype=torch.float32)

    return AltUpWeights(
        norm=row_norm(arch, deployment.placed(dense(weights["altup.router_norm.weight"]))),
        router=fuse_padded("altup.router", dense(weights["altup.router.weight"]), deployment),
        predict_OI=small("predict"),
        correct_OI=small("correct"),
        scale_D=deployment.placed(dense(weights["altup.output_scale"])),
    )


@dataclass(frozen=True)
class LaurelLinears:
    """The low-rank residual of a layer."""

    left: FusedLinear
    right: FusedLinear
    norm: RowNorm

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of these weights."""
        return self.left.weight_bytes + self.right.weight_bytes

    def report(self, layer_idx: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`."""
        return self.left.report(layer_idx) + self.right.report(layer_idx)

    def residual(self, x_TD: Tensor, normed_TD: Tensor, norm: Norm, phase: Phase) -> Tensor:
        """Return what is added to the output of attention [T, D]: the stream before, its norm and what LAuReL
        computes of it. `LAUREL_SCALE` multiplies the sum."""
        term_TD = norm(self.right(self.left(normed_TD, phase), phase), self.norm)
        total_TD = x_TD.to(torch.float32) + normed_TD.to(torch.float32) + term_TD.to(torch.float32)
        return total_TD.to(x_TD.dtype)


def laurel_linears(arch: Arch, weights: Weights, deployment: Deployment) -> LaurelLinears | None:
    """Return the low-rank residual of a layer, None where the model has none."""
    if not arch.laurel_rank:
        return None
    return LaurelLinears(
        fuse(("laurel.left",), weights, deployment),
        fuse(("laurel.right",), weights, deployment),
        row_norm(arch, deployment.placed(dense(weights["laurel.norm.weight"]))),
    )
