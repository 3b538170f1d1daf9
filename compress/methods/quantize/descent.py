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

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.kernels.columns import best_scale, descend_block
from compress.methods.quantize import REFINERS, Refiner, Rounded
from compress.quant.numerics import diagonal_blocks, whole_blocks
from compress.quant.products import product
from compress.quant.scheme import QuantizedWeight, Scheme

BLOCK_SIZE = 128
"""Columns of a group between two updates of its gradient: changes speed, not what is computed."""
PHASES = 16
"""Parts of the rows that are descended one after the other when rows are coupled: row r is of part r mod PHASES."""
ROW_DAMPING = 0.1
"""Share of mean(diag G) added to the diagonal."""


@REFINERS.register("descent")
class Descent(Refiner):
    kind: Literal["descent"] = "descent"
    sweeps: int = Field(
        4, ge=1, description="visits to every code; the loss never rises, and falls less each time"
    )
    refit: bool = Field(
        True, description="in each sweep, also the best scale of a group for the codes it has"
    )
    damping: float = Field(0.01, ge=0, le=1, description="share of mean(diag H) added to the diagonal")
    coupled_rounds: int = Field(
        0,
        ge=0,
        exclude_if=lambda rounds: (
            rounds == 0
        ),  # so that what was made before there was this key keeps its cache key
        description="visits to every row that know of the errors of the others, after the sweeps; needs `guide`",
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def refine(
        self,
        w_OI: Tensor,
        weight: QuantizedWeight,
        stats: InputStats,
        outputs: OutputMoment | None = None,
    ) -> Rounded:
        h_II = stats[SecondMoment].mean()
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
        return self._coupled(
            point, weight, w_IO, h_II, pull_I, [each.to(h_II, copy=True) for each in outputs.segments]
        )

    def _sweep_(self, point: "Point", g_IO: Tensor, h_II: Tensor, pull_I: Tensor, sweeps: int) -> None:
        """Uses up the gradient: behind the last sweep it holds for no column."""
        for sweep in range(sweeps):
            slope_IO = slopes(point, h_II) if self.refit else None
            for group in range(point.scale_GO.shape[0]):
                columns = point.columns(group)
                slope_NO = None if slope_IO is None else slope_IO[columns]
                moves_NO = visit_(
                    point, group, g_IO[columns], h_II[columns, columns], pull_I[columns], slope_NO
                )
                to_come = slice(columns.stop if sweep + 1 == sweeps else 0, None)
                g_IO[to_come].addmm_(h_II[to_come, columns], moves_NO)

    def _coupled(
        self,
        point: "Point",
        weight: QuantizedWeight,
        w_IO: Tensor,
        h_II: Tensor,
        pull_I: Tensor,
        segments: list[Tensor],
    ) -> Rounded:
        """The best of the points that the rounds reach, and the coupled loss of it and of the first."""
        for segment_RR in segments:
            segment_RR.diagonal().add_(
                ROW_DAMPING * max(float(segment_RR.diagonal().mean()), torch.finfo(torch.float32).tiny)
            )
        pulls = newton_pulls(segments)
        error_IO = point.values() - w_IO
        first = loss = coupled_loss(error_IO, h_II, segments)
        for _ in range(self.coupled_rounds):
            found = point.copy()
            for phase in range(min(PHASES, w_IO.shape[1])):
                rows = slice(phase, None, PHASES)
                some = found.rows(rows)
                step_IR = newton_step(error_IO, pulls[phase])
                self._sweep_(some, h_II @ step_IR, h_II, pull_I, 1)
                found.put_(rows, some)
                error_IO[:, rows] = some.values() - w_IO[:, rows]
            reached = coupled_loss(error_IO, h_II, segments)
            if reached >= loss:
                break
            point = found
            loss = reached
        return Rounded(point.weight(weight), {"coupled_loss": round(loss / first, 4)} if first > 0 else {})


def coupled_loss(error_IO: Tensor, h_II: Tensor, segments: list[Tensor]) -> float:
    """tr(G E H E^T)."""
    return float((product(h_II, error_IO) * _times_segments(error_IO, segments)).sum(dtype=torch.float64))


def newton_pulls(segments: list[Tensor]) -> list[list[Tensor]]:
    """By phase and segment: G_RR^-1 G_R of the phase's rows of the segment, [R, rows of the segment]."""
    pulls = [list[Tensor]() for _ in range(PHASES)]
    first = 0
    for segment_RR in segments:
        rows = len(segment_RR)
        missing = -rows % PHASES
        whole = F.pad(segment_RR, (0, missing, 0, missing))
        whole.diagonal()[rows:] = 1  # rows that make all phases equally long, and touch no other
        by_phase = whole.view(-1, PHASES, len(whole) // PHASES, PHASES)
        lower = torch.linalg.cholesky(by_phase.diagonal(dim1=1, dim2=3).permute(2, 0, 1))
        found = torch.cholesky_solve(by_phase.flatten(2).transpose(0, 1), lower)[..., :rows]
        for part, pull in enumerate(found):
            pulls[(first + part) % PHASES].append(pull[: len(range(part, rows, PHASES))])
        first += rows
    return pulls


def newton_step(error_IO: Tensor, pulls: list[Tensor]) -> Tensor:
    """[I, rows of the phase]: how far these rows are from their coupled bottom, G_RR^-1 (G E)_R, taken within each segment."""
    parts = error_IO.split([pull.shape[1] for pull in pulls], dim=1)
    return torch.cat([part @ pull.t() for part, pull in zip(parts, pulls, strict=True)], dim=1)


def _times_segments(error_IO: Tensor, segments: list[Tensor]) -> Tensor:
    parts = error_IO.split([len(each) for each in segments], dim=1)
    return torch.cat(
        [product(part, segment_RR) for part, segment_RR in zip(parts, segments, strict=True)], dim=1
    )


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
        zero_GO = (
            None if weight.zero_point_OG is None else weight.zero_point_OG.to(torch.float32).t().contiguous()
        )
        levels_IO = weight.codes_OI.to(torch.float32).t().contiguous()
        if zero_GO is not None:
            levels_IO -= zero_GO.repeat_interleave(weight.shape[1] // len(zero_GO), dim=0)
        return Point(weight.scheme, levels_IO, scale_GO, zero_GO, weight.scale_OG.dtype)

    def columns(self, group: int) -> slice:
        members = len(self.levels_IO) // len(self.scale_GO)
        return slice(group * members, (group + 1) * members)

    def values(self) -> Tensor:
        """Dequantized weights [I, O]."""
        return self.levels_IO * self.scale_GO.repeat_interleave(
            len(self.levels_IO) // len(self.scale_GO), dim=0
        )

    def copy(self) -> "Point":
        return replace(self, levels_IO=self.levels_IO.clone(), scale_GO=self.scale_GO.clone())

    def rows(self, rows: slice) -> "Point":
        """A point of some rows only, which shares nothing with this one."""
        zero_GO = None if self.zero_GO is None else self.zero_GO[:, rows].contiguous()
        return replace(
            self,
            levels_IO=self.levels_IO[:, rows].contiguous(),
            scale_GO=self.scale_GO[:, rows].contiguous(),
            zero_GO=zero_GO,
        )

    def put_(self, rows: slice, some: "Point") -> None:
        """Codes and scales of some rows become those of `some`."""
        self.levels_IO[:, rows] = some.levels_IO
        self.scale_GO[:, rows] = some.scale_GO

    def weight(self, before: QuantizedWeight) -> QuantizedWeight:
        """`before` with the codes and scales of this point."""
        codes_IO = self.levels_IO
        if self.zero_GO is not None:
            codes_IO = codes_IO + self.zero_GO.repeat_interleave(len(codes_IO) // len(self.zero_GO), dim=0)
        codes_OI = codes_IO.t().contiguous().to(self.scheme.code_dtype)
        scale_OG = self.scale_GO[:, :: self.scheme.block_rows].t().contiguous()
        return replace(before, codes_OI=codes_OI, scale_OG=scale_OG.to(self.scale_dtype))


def slopes(point: Point, h_II: Tensor) -> Tensor:
    """What the levels of each group make of its own block of H, [I, O]."""
    num_groups, num_outputs = point.scale_GO.shape
    return (diagonal_blocks(h_II, point.scheme) @ point.levels_IO.view(num_groups, -1, num_outputs)).view(
        -1, num_outputs
    )


def visit_(
    point: Point, group: int, g_NO: Tensor, h_NN: Tensor, pull_N: Tensor, slope_NO: Tensor | None
) -> Tensor:
    """The scales of one group, where there are slopes, and then its codes column by column go to their best stored values; what that moves
    the dequantized weights by, [N, O]. The pull is 1 / H_ii, and 0 where a code is to stay."""
    columns = point.columns(group)
    old_O = point.scale_GO[group]
    zero_O = None if point.zero_GO is None else point.zero_GO[group]
    levels_NO = point.levels_IO[columns]
    scheme = point.scheme
    if len(g_NO) <= BLOCK_SIZE and scheme.block_rows == 1:
        state = levels_NO, g_NO, h_NN, pull_N, scheme, old_O, zero_O
        found = descend_block(*state, slope_BO=slope_NO, scale_dtype=point.scale_dtype)
        point.levels_IO[columns], point.scale_GO[group], moves_NO = found
        return moves_NO
    scale_O = old_O
    g_NO = g_NO.clone()
    if slope_NO is not None:
        parabola = (
            _shared((g_NO * levels_NO).sum(dim=0), scheme),
            _shared((slope_NO * levels_NO).sum(dim=0), scheme),
        )
        scale_O = best_scale(old_O, *parabola, scheme, point.scale_dtype)
        g_NO.addcmul_(slope_NO, scale_O - old_O)
    moves_NO = levels_NO * (scale_O - old_O)
    for begin in range(0, len(g_NO), BLOCK_SIZE):
        inside = slice(begin, begin + BLOCK_SIZE)
        state = levels_NO[inside], g_NO[inside], h_NN[inside, inside], pull_N[inside], scheme, scale_O, zero_O
        levels_NO[inside], _, moves_BO = descend_block(*state)
        moves_NO[inside] += moves_BO
        g_NO[begin + BLOCK_SIZE :].addmm_(h_NN[begin + BLOCK_SIZE :, inside], moves_BO)
    point.scale_GO[group] = scale_O
    return moves_NO


def _shared(sum_O: Tensor, scheme: Scheme) -> Tensor:
    """Each row's own sum, or that of the rows it shares its scale with."""
    if scheme.block_rows == 1:
        return sum_O
    blocks = whole_blocks(sum_O.unsqueeze(1), scheme).view(-1, scheme.block_rows)
    return scheme.by_row(blocks.sum(dim=1), len(sum_O))
