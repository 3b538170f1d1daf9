"""Coordinate descent after rounding: every scale and every code in turn takes its best value while all others stand still.

The cyclic sweeps over codes are QuantEase's (arXiv 2309.01885); scales as coordinates of the same descent are COMQ's (arXiv 2403.07134).
A rounder decides each column once. Given its codes, the output error of one row w with dequantized values q,

    loss(q) = (w - q) H (w - q)^T,   H = E[x x^T] + d I,   gradient/2: g = (q - w) H

is a parabola in each single number, so the best stored value of that number is the one nearest to the parabola's bottom:

    code i of the row:    q_i := the nearest dequantized value to q_i - g_i / H_ii
    scale of a group u:   s := the stored value nearest to s - (g . u) / (u H u^T), u = the group's codes - zero point, 0 elsewhere
                          (both products summed over the rows that share the scale)

Both are exact over the numbers that can be stored, the scale's dtype included, so no step can raise the loss, and the result is never
worse than what the rounder gave. A sweep visits the groups in order: first the group's scale, then its codes column by column. Zero points
stay. An input that never fires (diag 0) keeps the codes it has.

Shapes: O out, I in, G groups, N members of a group, B columns of a block. All arithmetic in float32, columns as rows ([I, O]) because one
step reads one column of every output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import SecondMoment, Stat, StatFactory
from compress.errors import UsageError
from compress.kernels.columns import descend_block
from compress.methods import REFINERS, Rounded
from compress.quant.numerics import storable, whole_blocks
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.recipe import Spec

BLOCK_SIZE = 128
"""Columns between two updates of the whole gradient: changes speed, not what is computed."""


@REFINERS.register("descent")
class Descent(Spec):
    kind: Literal["descent"] = "descent"
    sweeps: int = Field(4, ge=1, description="visits to every code; the loss never rises, and falls less each time")
    refit: bool = Field(True, description="in each sweep, also the best scale of a group for the codes it has")
    damping: float = Field(0.01, ge=0, le=1, description="share of mean(diag H) added to the diagonal")

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def refine(self, w_OI: Tensor, weight: QuantizedWeight, stats: Mapping[str, Stat]) -> Rounded:
        moment = stats["second_moment"]
        assert isinstance(moment, SecondMoment)
        h_II = moment.mean()
        if not bool(torch.isfinite(h_II).all()):
            raise UsageError(
                "the second moment of a layer's inputs is not finite: the calibration data drives the model to NaN or infinity. Check the "
                "checkpoint, or compute in float32."
            )
        dead_I = h_II.diagonal() == 0
        if bool(dead_I.all()):
            return Rounded(weight, {"codes_moved": 0.0})
        h_II.diagonal().add_(self.damping * h_II.diagonal()[~dead_I].mean())
        pull_I = (1 / h_II.diagonal()).masked_fill(dead_I, 0.0)
        point = Point.of(weight)
        g_IO = h_II @ (point.values() - w_OI.t())
        for _ in range(self.sweeps):
            for group in range(point.scale_GO.shape[0]):
                if self.refit:
                    refit_scale_(point, group, g_IO, h_II)
                descend_codes_(point, group, g_IO, h_II, pull_I)
        refined = point.weight(weight)
        moved = (refined.codes_OI.view(torch.int8) != weight.codes_OI.view(torch.int8)).float().mean()
        return Rounded(refined, {"codes_moved": round(float(moved), 4)})


@dataclass(frozen=True)
class Point:
    """Where the descent stands: codes less their zero points [I, O], and scales as stored [G, O], for each row its own copy, both in
    float32."""

    scheme: Scheme
    levels_IO: Tensor
    scale_GO: Tensor
    zero_GO: Tensor | None
    scale_dtype: torch.dtype

    @staticmethod
    def of(weight: QuantizedWeight) -> "Point":
        scale_GO = weight.scheme.by_row(weight.scale_OG, weight.shape[0]).to(torch.float32).t().contiguous()
        zero_GO = None if weight.zero_point_OG is None else weight.zero_point_OG.to(torch.float32).t().contiguous()
        levels_IO = weight.codes_OI.to(torch.float32).t().contiguous()
        if zero_GO is not None:
            levels_IO -= zero_GO.repeat_interleave(weight.shape[1] // len(zero_GO), dim=0)
        return Point(weight.scheme, levels_IO, scale_GO, zero_GO, weight.scale_OG.dtype)

    def columns(self, group: int) -> slice:
        members = len(self.levels_IO) // len(self.scale_GO)
        return slice(group * members, (group + 1) * members)

    def values(self) -> Tensor:
        """Dequantized weights [I, O]."""
        return self.levels_IO * self.scale_GO.repeat_interleave(len(self.levels_IO) // len(self.scale_GO), dim=0)

    def weight(self, before: QuantizedWeight) -> QuantizedWeight:
        """`before` with the codes and scales of this point."""
        codes_IO = self.levels_IO
        if self.zero_GO is not None:
            codes_IO = codes_IO + self.zero_GO.repeat_interleave(len(codes_IO) // len(self.zero_GO), dim=0)
        codes_OI = codes_IO.t().contiguous().to(self.scheme.code_dtype)
        scale_OG = self.scale_GO[:, :: self.scheme.block_rows].t().contiguous()
        return replace(before, codes_OI=codes_OI, scale_OG=scale_OG.to(self.scale_dtype))


def refit_scale_(point: Point, group: int, g_IO: Tensor, h_II: Tensor) -> None:
    """The scales of one group go to their best stored values; one of zeros only, or whose best is not positive, stays as it is."""
    columns, scale_O = point.columns(group), point.scale_GO[group]
    levels_NO = point.levels_IO[columns]
    slope_IO = h_II[:, columns] @ levels_NO
    curvature_O = _shared((slope_IO[columns] * levels_NO).sum(dim=0), point.scheme)
    best_O = scale_O - _shared((g_IO[columns] * levels_NO).sum(dim=0), point.scheme) / curvature_O
    best_O = storable(best_O, point.scheme, point.scale_dtype).to(torch.float32)
    best_O = torch.where((curvature_O > 0) & (best_O > 0) & torch.isfinite(best_O), best_O, scale_O)
    g_IO += slope_IO * (best_O - scale_O)
    point.scale_GO[group] = best_O


def _shared(sum_O: Tensor, scheme: Scheme) -> Tensor:
    """Each row's own sum, or that of the rows it shares its scale with."""
    if scheme.block_rows == 1:
        return sum_O
    blocks = whole_blocks(sum_O.unsqueeze(1), scheme).view(-1, scheme.block_rows)
    return scheme.by_row(blocks.sum(dim=1), len(sum_O))


def descend_codes_(point: Point, group: int, g_IO: Tensor, h_II: Tensor, pull_I: Tensor) -> None:
    """Every code of one group, column by column, goes to its best value; the gradient outside a block follows once per block.

    `pull_I` is 1 / H_ii, and 0 where a code is to stay.
    """
    columns, scale_O, zero_O = point.columns(group), point.scale_GO[group], None if point.zero_GO is None else point.zero_GO[group]
    for begin in range(columns.start, columns.stop, BLOCK_SIZE):
        end = min(begin + BLOCK_SIZE, columns.stop)
        inside = slice(begin, end)
        state = point.levels_IO[inside], g_IO[inside], h_II[inside, inside], pull_I[inside]
        point.levels_IO[inside], moves_BO = descend_block(*state, point.scheme, scale_O, zero_O)
        g_IO.addmm_(h_II[:, inside], moves_BO)
