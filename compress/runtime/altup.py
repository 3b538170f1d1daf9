"""AltUp and LAuReL in serving (`models/altup.py`, `models/laurel.py`): the weights of their kernels, and
the linears by which streams begin and are joined.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of LAuReL, P width of an embedding for a layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.altup import AltUpWeights
from compress.kernels.operands.rows import Branch, LaurelRows, RowNorm
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import FusedLinear
from compress.runtime.fusing import fuse
from compress.runtime.row_norms import row_norm

LAUREL_SCALE = 2**-0.5
"""The factor of the stream after attention and LAuReL."""


@dataclass(frozen=True)
class StreamLinears:
    """The linears of the streams but the first: those by which they begin, or by which the head reads
    them."""

    linears: tuple[FusedLinear, ...]

    def of_rows(self, x_TD: Tensor, phase: Phase) -> list[Tensor]:
        """Return the products of rows [T, D] with all matrices, float32 [T, D]."""
        return [each(x_TD, phase, out_dtype=torch.float32) for each in self.linears]

    def of_streams(self, streams_TE: Tensor, phase: Phase) -> list[Tensor]:
        """Return the products of the streams [T, n D] but the first with their matrices, float32 [T, D]."""
        _, *others = streams_TE.chunk(len(self.linears) + 1, dim=1)
        return [
            linear(each.contiguous(), phase, out_dtype=torch.float32)
            for linear, each in zip(self.linears, others, strict=True)
        ]

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


def altup_weights(arch: Arch, weights: Weights, deployment: Deployment) -> AltUpWeights | None:
    """Return the alternating updates of a layer, None where the model has none."""
    if not arch.altup_streams:
        return None

    def small(name: str) -> Tensor:
        return (
            dense(weights[f"altup.{name}.weight"])
            .to(device=deployment.device, dtype=torch.float32)
            .contiguous()
        )

    return AltUpWeights(
        norm=row_norm(arch, deployment.placed(dense(weights["altup.router_norm.weight"]))),
        router_nD=deployment.placed(dense(weights["altup.router.weight"])).contiguous(),
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

    def of_rows(self, normed_TD: Tensor, phase: Phase) -> LaurelRows:
        """Return the terms [T, D] that LAuReL computes of the rows that attention reads. They are added to
        the stream with the output of attention, and `LAUREL_SCALE` multiplies that sum."""
        low_rank_TD = self.right(self.left(normed_TD, phase), phase)
        return LaurelRows(normed_TD, Branch(low_rank_TD, self.norm))


def laurel_linears(arch: Arch, weights: Weights, deployment: Deployment) -> LaurelLinears | None:
    """Return the low-rank residual of a layer, None where the model has none."""
    if not arch.laurel_rank:
        return None
    return LaurelLinears(
        fuse(("laurel.left",), weights, deployment),
        fuse(("laurel.right",), weights, deployment),
        row_norm(arch, deployment.placed(dense(weights["laurel.norm.weight"]))),
    )
