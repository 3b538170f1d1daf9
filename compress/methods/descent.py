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

Rows may be coupled, by a moment G = E[g g^T] of the gradients at the outputs (`calibrate/guide.py`):

    loss(Q) = tr(G E H E^T),   E = Q - W,   whose bottom for the rows R, all others standing still, is Q_R - G_RR^-1 (G E)_R

so after the first sweeps a few rows at a time are descended towards that point, rows as far apart as can be, since neighbours are
correlated most and within R the descent takes each row by itself. Rounds go on as long as they lower the coupled loss. The output factor
of the Hessian is YAQA's (arXiv 2505.22988), which rounds with feedback along both sides at once.

Shapes: O out, I in, G groups, N members of a group, B columns of a block. All arithmetic in float32, columns as rows ([I, O]) because one
step reads one column of every output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import SecondMoment, Stat, StatFactory
from compress.errors import UsageError
from compress.kernels.columns import descend_block
from compress.methods import REFINERS, Rounded
from compress.quant.numerics import storable, whole_blocks
from compress.quant.products import product
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.recipe import Spec

BLOCK_SIZE = 128
"""Columns between two updates of the whole gradient: changes speed, not what is computed."""
PHASES = 16
"""Parts of the rows that are descended one after the other when rows are coupled: row r is of part r mod PHASES."""
ROW_DAMPING = 0.1
"""Share of mean(diag G) added to the diagonal."""


@REFINERS.register("descent")
class Descent(Spec):
    kind: Literal["descent"] = "descent"
    sweeps: int = Field(4, ge=1, description="visits to every code; the loss never rises, and falls less each time")
    refit: bool = Field(True, description="in each sweep, also the best scale of a group for the codes it has")
    damping: float = Field(0.01, ge=0, le=1, description="share of mean(diag H) added to the diagonal")
    coupled_rounds: int = Field(
        0,
        ge=0,
        exclude_if=lambda rounds: rounds == 0,  # so that what was made before there was this key keeps its cache key
        description="visits to every row that know of the errors of the others, after the sweeps; needs `guide`",
    )

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def refine(self, w_OI: Tensor, weight: QuantizedWeight, stats: Mapping[str, Stat], outputs: OutputMoment | None = None) -> Rounded:
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
            return Rounded(weight)
        h_II.diagonal().add_(self.damping * h_II.diagonal()[~dead_I].mean())
        pull_I = (1 / h_II.diagonal()).masked_fill(dead_I, 0.0)
        point = Point.of(weight)
        w_IO = w_OI.t()
        self._sweep_(point, h_II @ (point.values() - w_IO), h_II, pull_I, self.sweeps)
        if outputs is None or not self.coupled_rounds or weight.scheme.block_rows > 1:
            return Rounded(point.weight(weight))
        return self._coupled(point, weight, w_IO, h_II, pull_I, [each.to(h_II, copy=True) for each in outputs.segments])

    def _sweep_(self, point: "Point", g_IO: Tensor, h_II: Tensor, pull_I: Tensor, sweeps: int) -> None:
        for _ in range(sweeps):
            for group in range(point.scale_GO.shape[0]):
                if self.refit:
                    refit_scale_(point, group, g_IO, h_II)
                descend_codes_(point, group, g_IO, h_II, pull_I)

    def _coupled(
        self, point: "Point", weight: QuantizedWeight, w_IO: Tensor, h_II: Tensor, pull_I: Tensor, segments: list[Tensor]
    ) -> Rounded:
        """The best of the points that the rounds reach, and the coupled loss of it and of the first."""
        for segment_RR in segments:
            segment_RR.diagonal().add_(ROW_DAMPING * max(float(segment_RR.diagonal().mean()), torch.finfo(torch.float32).tiny))
        error_IO = point.values() - w_IO
        first = loss = coupled_loss(error_IO, h_II, segments)
        for _ in range(self.coupled_rounds):
            found = point.copy()
            for phase in range(PHASES):
                rows = slice(phase, None, PHASES)
                some = found.rows(rows)
                step_IR = newton_step(error_IO, segments, phase)
                self._sweep_(some, h_II @ step_IR, h_II, pull_I, 1)
                found.put_(rows, some)
                error_IO[:, rows] = some.values() - w_IO[:, rows]
            reached = coupled_loss(error_IO, h_II, segments)
            if reached >= loss:
                break
            point, loss = found, reached
        return Rounded(point.weight(weight), {"coupled_loss": round(loss / first, 4)} if first > 0 else {})


def coupled_loss(error_IO: Tensor, h_II: Tensor, segments: list[Tensor]) -> float:
    """tr(G E H E^T)."""
    return float((product(h_II, error_IO) * _times_segments(error_IO, segments)).sum(dtype=torch.float64))


def newton_step(error_IO: Tensor, segments: list[Tensor], phase: int) -> Tensor:
    """[I, rows of the phase]: how far these rows are from their coupled bottom, G_RR^-1 (G E)_R, taken within each segment."""
    steps, first = [], 0
    for segment_RR in segments:
        own = slice((phase - first) % PHASES, None, PHASES)
        some = segment_RR[own]
        if len(some):
            pulled = some @ error_IO[:, first : first + len(segment_RR)].t()
            lower = torch.linalg.cholesky(some[:, own])
            steps.append(torch.cholesky_solve(pulled, lower).t())
        first += len(segment_RR)
    return torch.cat(steps, dim=1)


def _times_segments(error_IO: Tensor, segments: list[Tensor]) -> Tensor:
    parts = error_IO.split([len(each) for each in segments], dim=1)
    return torch.cat([product(part, segment_RR) for part, segment_RR in zip(parts, segments, strict=True)], dim=1)


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

    def copy(self) -> "Point":
        return replace(self, levels_IO=self.levels_IO.clone(), scale_GO=self.scale_GO.clone())

    def rows(self, rows: slice) -> "Point":
        """A point of some rows only, which shares nothing with this one."""
        zero_GO = None if self.zero_GO is None else self.zero_GO[:, rows].contiguous()
        return replace(self, levels_IO=self.levels_IO[:, rows].contiguous(), scale_GO=self.scale_GO[:, rows].contiguous(), zero_GO=zero_GO)

    def put_(self, rows: slice, some: "Point") -> None:
        """Codes and scales of some rows become those of `some`."""
        self.levels_IO[:, rows], self.scale_GO[:, rows] = some.levels_IO, some.scale_GO

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
