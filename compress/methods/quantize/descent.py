"""Coordinate descent after rounding: every scale and every code in turn takes its best value while all others
are fixed.

The cyclic sweeps over codes are QuantEase's (arXiv 2309.01885); scales as coordinates of the same descent are
COMQ's (arXiv 2403.07134). A rounder decides each column once; this method visits the columns again. Given the
codes, the output error of one row w with dequantized values q,

    loss(q) = (w - q) H (w - q)^T,   H = E[x x^T] + d I,   half its gradient: g = (q - w) H

is a parabola in each single number, so the best stored value of that number is the one nearest to the
parabola's minimum:

    code i of the row:          q_i := the nearest dequantized value to  q_i - g_i / H_ii
    scale of a scale group:     s := the stored value nearest to  s - (g . l) / (l H l^T)

where l are the group's levels (codes less zero point), 0 elsewhere, and both products are summed over the
rows that share the scale. l H is computed once a sweep (`curvature_products`); a change ds of the scale
changes g by l H ds. Both steps are exact over the numbers that can be stored, the scale's dtype included, so
no step raises the loss, and the result is never worse than what the rounder returned. A sweep visits the
scale groups in order: first the group's scale, then its codes column by column. Zero points stay. An input
that is always zero (diagonal 0) keeps its codes.

Rows may be coupled, by a moment G = E[g g^T] of the gradients at the outputs (`calibrate/guide.py`):

    loss(Q) = tr(G E H E^T),   E = Q - W,   minimum for the rows R alone: Q_R - G_RR^-1 (G E)_R

After the first sweeps, a few rows at a time are descended towards that minimum. Rows that move at the same
time are as far apart as possible, since neighbours are correlated most and the descent treats them as
independent. Rounds go on as long as they lower the coupled loss. The output factor of the Hessian is YAQA's
(arXiv 2505.22988), which rounds with feedback along both sides at once.

Not done: zero points are no coordinates, and rows that share scales are not coupled.

Memory layout: columns as rows ([I, O]), because one step reads one column of every output; all arithmetic in
float32. Shapes: O out, I in, G scale groups, N columns of a scale group, B columns of a block, R rows that
move at the same time.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from compress.calibrate.guide import OutputMoment
from compress.calibrate.stats import NOT_FINITE, InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.kernels.columns import DescentBlock, best_scale, descend_block
from compress.methods.quantize import REFINERS, Refiner, Rounded
from compress.quant.numerics import diagonal_blocks, whole_blocks
from compress.quant.products import product
from compress.quant.scheme import QuantizedWeight, Scheme

BLOCK_SIZE = 128
"""Columns of a scale group between two updates of its gradient: changes speed, not the result."""
NUM_ROW_SETS = 16
"""Sets of rows that are descended one after the other when rows are coupled: row r is in set r mod
NUM_ROW_SETS."""
ROW_DAMPING = 0.1
"""Share of mean(diag G) added to the diagonal."""


@REFINERS.register("descent")
class Descent(Refiner):
    """Coordinate descent over codes and scales."""

    kind: Literal["descent"] = "descent"
    sweeps: int = Field(
        4, ge=1, le=1_000, description="visits to every code; the loss never rises, and falls less each time"
    )
    refit: bool = Field(
        True, description="in each sweep, also the best scale of a group for the codes it has"
    )
    damping: float = Field(0.01, ge=0, le=1, description="share of mean(diag H) added to the diagonal")
    coupled_rounds: int = Field(
        0,
        ge=0,
        le=1_000,
        exclude_if=lambda rounds: rounds == 0,  # keeps the cache keys of recipes older than this option
        description="visits to every row after the sweeps, which take the errors of other rows into account; "
        "needs `guide`",
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
        """Return codes and scales with a loss no larger than that of `weight`.

        Raises:
            UsageError: H holds NaN or infinity.
        """
        h_II = stats[SecondMoment].mean()
        if not bool(torch.isfinite(h_II).all()):
            raise UsageError(NOT_FINITE)
        is_dead_I = h_II.diagonal() == 0
        if bool(is_dead_I.all()):
            return Rounded(weight)
        h_II.diagonal().add_(self.damping * h_II.diagonal()[~is_dead_I].mean())
        inv_diag_I = (1 / h_II.diagonal()).masked_fill(is_dead_I, 0.0)
        state = DescentState.from_weight(weight)
        w_IO = w_OI.t()
        self._sweep_(state, h_II @ (state.values() - w_IO), h_II, inv_diag_I, num_sweeps=self.sweeps)
        if outputs is None or not self.coupled_rounds or weight.scheme.block_rows > 1:
            return Rounded(state.to_weight(weight))
        segments = [segment_RR.to(h_II, copy=True) for segment_RR in outputs.segments]
        return self._coupled(state, weight, w_IO, h_II, inv_diag_I, segments)

    def _sweep_(
        self,
        state: "DescentState",
        gradient_IO: Tensor,
        h_II: Tensor,
        inv_diag_I: Tensor,
        *,
        num_sweeps: int,
    ) -> None:
        """Descend all scale groups `num_sweeps` times; overwrites `gradient_IO`, which is stale after the
        last sweep."""
        for sweep in range(num_sweeps):
            products_IO = curvature_products(state, h_II) if self.refit else None
            for group in range(state.scale_GO.shape[0]):
                columns = state.columns(group)
                moves_NO = descend_group_(
                    state,
                    group,
                    gradient_IO[columns],
                    h_II[columns, columns],
                    inv_diag_I[columns],
                    None if products_IO is None else products_IO[columns],
                )
                is_last = sweep + 1 == num_sweeps
                read_later = slice(columns.stop if is_last else 0, None)
                gradient_IO[read_later].addmm_(h_II[read_later, columns], moves_NO)

    def _coupled(
        self,
        state: "DescentState",
        weight: QuantizedWeight,
        w_IO: Tensor,
        h_II: Tensor,
        inv_diag_I: Tensor,
        segments: list[Tensor],
    ) -> Rounded:
        """Return the best of the states that the coupled rounds reach; the fact `coupled_loss` is its loss
        relative to the first state's."""
        for segment_RR in segments:
            mean = max(float(segment_RR.diagonal().mean()), torch.finfo(torch.float32).tiny)
            segment_RR.diagonal().add_(ROW_DAMPING * mean)
        factors = newton_factors(segments)
        error_IO = state.values() - w_IO
        first_loss = loss = coupled_loss(error_IO, h_II, segments)
        for _ in range(self.coupled_rounds):
            next_state = state.copy()
            for row_set in range(min(NUM_ROW_SETS, w_IO.shape[1])):
                rows = slice(row_set, None, NUM_ROW_SETS)
                moving = next_state.select_rows(rows)
                step_IR = newton_step(error_IO, factors[row_set])
                self._sweep_(moving, h_II @ step_IR, h_II, inv_diag_I, num_sweeps=1)
                next_state.set_rows_(rows, moving)
                error_IO[:, rows] = moving.values() - w_IO[:, rows]
            next_loss = coupled_loss(error_IO, h_II, segments)
            if next_loss >= loss:
                break
            state = next_state
            loss = next_loss
        facts = {"coupled_loss": round(loss / first_loss, 4)} if first_loss > 0 else {}
        return Rounded(state.to_weight(weight), facts)


def coupled_loss(error_IO: Tensor, h_II: Tensor, segments: list[Tensor]) -> float:
    """Return tr(G E H E^T), with G given by its diagonal blocks."""
    parts = error_IO.split([len(segment_RR) for segment_RR in segments], dim=1)
    g_times_error_IO = torch.cat(
        [product(part, segment_RR) for part, segment_RR in zip(parts, segments, strict=True)], dim=1
    )
    return float((product(h_II, error_IO) * g_times_error_IO).sum(dtype=torch.float64))


def newton_factors(segments: list[Tensor]) -> list[list[Tensor]]:
    """Return, by row set and segment, G_RR^-1 G_R: [rows of the set in the segment, rows of the segment]."""
    factors = [list[Tensor]() for _ in range(NUM_ROW_SETS)]
    first = 0
    for segment_RR in segments:
        num_rows = len(segment_RR)
        missing = -num_rows % NUM_ROW_SETS
        padded = F.pad(segment_RR, (0, missing, 0, missing))
        padded.diagonal()[num_rows:] = 1  # rows that make all sets equally long, uncorrelated with the others
        by_set = padded.view(-1, NUM_ROW_SETS, len(padded) // NUM_ROW_SETS, NUM_ROW_SETS)
        lower = torch.linalg.cholesky(by_set.diagonal(dim1=1, dim2=3).permute(2, 0, 1))
        solved = torch.cholesky_solve(by_set.flatten(2).transpose(0, 1), lower)[..., :num_rows]
        for offset, factor in enumerate(solved):
            num_set_rows = len(range(offset, num_rows, NUM_ROW_SETS))
            factors[(first + offset) % NUM_ROW_SETS].append(factor[:num_set_rows])
        first += num_rows
    return factors


def newton_step(error_IO: Tensor, factors: list[Tensor]) -> Tensor:
    """Return G_RR^-1 (G E)_R, [I, R]: how far the rows of one set are from their coupled minimum.

    `factors` are those of the set, one for each segment (`newton_factors`).
    """
    parts = error_IO.split([factor.shape[1] for factor in factors], dim=1)
    return torch.cat([part @ factor.t() for part, factor in zip(parts, factors, strict=True)], dim=1)


@dataclass(frozen=True)
class DescentState:
    """Codes and scales during the descent, in float32: levels (codes less zero points) [I, O], scales and
    zero points [G, O].

    Every row has its own copy of a scale, also where rows share it. `scale_dtype` is the dtype that scales
    are stored in.
    """

    scheme: Scheme
    levels_IO: Tensor
    scale_GO: Tensor
    zero_GO: Tensor | None
    scale_dtype: torch.dtype

    @staticmethod
    def from_weight(weight: QuantizedWeight) -> "DescentState":
        """Return the state that a quantized weight describes."""
        scale_GO = weight.scheme.by_row(weight.scale_OG, weight.shape[0]).to(torch.float32).t().contiguous()
        zero_OG = weight.zero_point_OG
        zero_GO = None if zero_OG is None else zero_OG.to(torch.float32).t().contiguous()
        levels_IO = weight.codes_OI.to(torch.float32).t().contiguous()
        if zero_GO is not None:
            levels_IO -= zero_GO.repeat_interleave(weight.shape[1] // len(zero_GO), dim=0)
        return DescentState(weight.scheme, levels_IO, scale_GO, zero_GO, weight.scale_OG.dtype)

    def to_weight(self, before: QuantizedWeight) -> QuantizedWeight:
        """Return `before` with the codes and scales of this state."""
        codes_IO = self.levels_IO
        if self.zero_GO is not None:
            codes_IO = codes_IO + self.zero_GO.repeat_interleave(len(codes_IO) // len(self.zero_GO), dim=0)
        codes_OI = codes_IO.t().contiguous().to(self.scheme.code_dtype)
        scale_OG = self.scale_GO[:, :: self.scheme.block_rows].t().contiguous()
        return replace(before, codes_OI=codes_OI, scale_OG=scale_OG.to(self.scale_dtype))

    def columns(self, group: int) -> slice:
        """Return the columns of a scale group."""
        size = len(self.levels_IO) // len(self.scale_GO)
        return slice(group * size, (group + 1) * size)

    def values(self) -> Tensor:
        """Return the dequantized weights [I, O]."""
        size = len(self.levels_IO) // len(self.scale_GO)
        return self.levels_IO * self.scale_GO.repeat_interleave(size, dim=0)

    def copy(self) -> "DescentState":
        """Return a state with tensors of its own."""
        return replace(self, levels_IO=self.levels_IO.clone(), scale_GO=self.scale_GO.clone())

    def select_rows(self, rows: slice) -> "DescentState":
        """Return a state of some rows, with tensors of its own."""
        return replace(
            self,
            levels_IO=self.levels_IO[:, rows].contiguous(),
            scale_GO=self.scale_GO[:, rows].contiguous(),
            zero_GO=None if self.zero_GO is None else self.zero_GO[:, rows].contiguous(),
        )

    def set_rows_(self, rows: slice, other: "DescentState") -> None:
        """Set the codes and scales of some rows to those of `other`, in place."""
        self.levels_IO[:, rows] = other.levels_IO
        self.scale_GO[:, rows] = other.scale_GO


def curvature_products(state: DescentState, h_II: Tensor) -> Tensor:
    """Return H l of every scale group, [I, O]: its own block of H times its levels."""
    num_groups, num_outputs = state.scale_GO.shape
    levels_GNO = state.levels_IO.view(num_groups, -1, num_outputs)
    return (diagonal_blocks(h_II, state.scheme) @ levels_GNO).view(-1, num_outputs)


def descend_group_(
    state: DescentState,
    group: int,
    gradient_NO: Tensor,
    h_NN: Tensor,
    inv_diag_N: Tensor,
    curvature_product_NO: Tensor | None,
) -> Tensor:
    """Set the scales of one group, if a curvature product is given, and then its codes, column by column, to
    their best stored values.

    Changes `state` in place and returns the changes of the dequantized weights, [N, O]. `inv_diag_N` is 1 /
    H_ii, and 0 for codes that stay.
    """
    columns = state.columns(group)
    block = DescentBlock(
        levels_BO=state.levels_IO[columns],
        gradient_BO=gradient_NO,
        h_BB=h_NN,
        inv_diag_B=inv_diag_N,
        scheme=state.scheme,
        scale_O=state.scale_GO[group],
        zero_O=None if state.zero_GO is None else state.zero_GO[group],
    )
    if len(gradient_NO) <= BLOCK_SIZE and state.scheme.block_rows == 1:
        levels_NO, scale_O, moves_NO = descend_block(
            block, curvature_product_BO=curvature_product_NO, scale_dtype=state.scale_dtype
        )
        state.levels_IO[columns] = levels_NO
        state.scale_GO[group] = scale_O
        return moves_NO
    scale_O, gradient_NO = _refit(block, curvature_product_NO, state.scale_dtype)
    moves_NO = block.levels_BO * (scale_O - block.scale_O)
    for begin in range(0, len(gradient_NO), BLOCK_SIZE):
        inside = slice(begin, begin + BLOCK_SIZE)
        after = slice(begin + BLOCK_SIZE, None)
        part = replace(
            block,
            levels_BO=block.levels_BO[inside],
            gradient_BO=gradient_NO[inside],
            h_BB=h_NN[inside, inside],
            inv_diag_B=inv_diag_N[inside],
            scale_O=scale_O,
        )
        block.levels_BO[inside], _, moves_BO = descend_block(part)
        moves_NO[inside] += moves_BO
        gradient_NO[after].addmm_(h_NN[after, inside], moves_BO)
    state.scale_GO[group] = scale_O
    return moves_NO


def _refit(
    block: DescentBlock, curvature_product_NO: Tensor | None, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the best scales [O] of a whole scale group, and a copy of its gradient [N, O] after they have
    changed."""
    gradient_NO = block.gradient_BO.clone()
    if curvature_product_NO is None:
        return block.scale_O, gradient_NO
    scheme = block.scheme
    scale_O = best_scale(
        block.scale_O,
        _sum_over_shared_rows((gradient_NO * block.levels_BO).sum(dim=0), scheme),
        _sum_over_shared_rows((curvature_product_NO * block.levels_BO).sum(dim=0), scheme),
        scheme,
        scale_dtype,
    )
    return scale_O, gradient_NO.addcmul_(curvature_product_NO, scale_O - block.scale_O)


def _sum_over_shared_rows(value_O: Tensor, scheme: Scheme) -> Tensor:
    """Return, for every row, the sum over the rows that it shares its scale with."""
    if scheme.block_rows == 1:
        return value_O
    blocks = whole_blocks(value_O.unsqueeze(1), scheme).view(-1, scheme.block_rows)
    return scheme.by_row(blocks.sum(dim=1), len(value_O))
