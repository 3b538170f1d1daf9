"""Optimal brain surgeon for structure, greedily: remove the unit whose removal costs least once the columns
that stay have made up for it, update weights and inverse, repeat.

For the output error tr((W - W') H (W - W')^T) with H = E[x x^T] (damped) and P = H^-1, removing the columns S
of a unit costs at best

    loss(S) = tr( W_S (P_SS)^-1 W_S^T ),    W <- W - W_S (P_SS)^-1 P_S,    P <- P - P_:S (P_SS)^-1 P_S:

(Hassibi and Stork 1992; for structure in ZipLM, arXiv 2302.04089). The losses of successive removals add up
to that of the least-squares solution over the columns that stay. Only the choice is made here: `compensate:
least_squares` finds the same weights from H, in one solve.

Single columns, thousands of them, are removed in blocks of B. Inside a block W and P stay as they are and
each removal adds one row to two factors, W' = W - E^T R and P' = P - R^T R (R [B, I], E [B, O]); only what
decides, the squared norms of W's columns and the diagonal of P, is updated after every removal. The order is
the same as without blocks; a step reads W once, O I numbers, where it would otherwise read and write both W
and P.

All in float64: P is the inverse of a matrix whose eigenvalues spread over many orders of magnitude.

Shapes: O out, I in, U units, C columns of a unit, V units that can still be removed.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import NOT_FINITE, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer
from compress.models.pruning import Units
from compress.recipe import MAX_SIZE


@SCORERS.register("obs")
class Obs(Scorer):
    """Units are removed one by one, each time the one with the least output error."""

    kind: Literal["obs"] = "obs"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")
    block_size: int = Field(
        64,
        ge=1,
        le=MAX_SIZE,
        description="columns between two updates of the whole matrices; changes speed, not the choice",
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        h_II = candidates.stats[SecondMoment].mean()
        is_dead_I = h_II.diagonal() == 0
        w_OI = torch.where(
            is_dead_I, 0.0, candidates.w_OI.to(torch.float64)
        )  # removing a dead input costs nothing
        inverse_II = inverse(h_II, damping=self.damping)
        del h_II  # 0.5 GB and more for a wide FFN
        if units.width == 1 and units.num_parts == 1:
            return eliminate_columns_(
                w_OI, inverse_II, units.num_units - num_kept, block_size=self.block_size
            )
        return eliminate_units(w_OI, inverse_II, units, num_kept)


def inverse(h_II: Tensor, *, damping: float) -> Tensor:
    """Return (H + d I)^-1 in float64, with d = `damping` times the mean of the nonzero diagonal of H.

    Raises:
        UsageError: H holds NaN or infinity.
    """
    is_alive_I = h_II.diagonal() != 0
    mean = h_II.diagonal()[is_alive_I].mean() if bool(is_alive_I.any()) else h_II.new_ones(())
    damped_II = h_II.to(torch.float64, copy=True)
    damped_II.diagonal().add_(damping * mean)
    lower_II, failed = torch.linalg.cholesky_ex(damped_II)
    if failed != 0:
        raise UsageError(NOT_FINITE)
    return torch.cholesky_inverse(lower_II)


def eliminate_columns_(w_OI: Tensor, p_II: Tensor, num_removed: int, *, block_size: int) -> Choice:
    """Remove `num_removed` single columns greedily; overwrites `w_OI` and `p_II`.

    The score of a removed column is its loss when it was removed, that of a column that stays its loss if it
    were removed next.
    """
    is_kept_I = torch.ones(w_OI.shape[1], dtype=torch.bool, device=w_OI.device)
    score_I = w_OI.new_zeros(w_OI.shape[1])
    norm_I = w_OI.square().sum(dim=0)
    diagonal_I = p_II.diagonal().clone()
    for begin in range(0, num_removed, block_size):
        num = min(block_size, num_removed - begin)
        rows_BI = w_OI.new_zeros(num, w_OI.shape[1])
        errors_BO = w_OI.new_zeros(num, w_OI.shape[0])
        for step in range(num):
            r_BI = rows_BI[:step]
            e_BO = errors_BO[:step]
            loss_I = (norm_I / diagonal_I).masked_fill(~is_kept_I, torch.inf)
            j = loss_I.argmin().view(1)  # stays on the device, so that no step waits for a copy to the host
            score_I[j] = loss_I[j]
            is_kept_I[j] = False
            r_B = r_BI.index_select(1, j)
            row_I = p_II.index_select(0, j).squeeze(0) - (r_B * r_BI).sum(dim=0)
            error_O = w_OI.index_select(1, j).squeeze(1) - (r_B * e_BO).sum(dim=0)
            root = row_I.index_select(0, j).sqrt()
            row_I = row_I / root
            error_O = error_O / root
            error_times_w_I = error_O @ w_OI - (e_BO @ error_O) @ r_BI
            norm_I = norm_I - 2 * row_I * error_times_w_I + error_O.square().sum() * row_I.square()
            norm_I = norm_I.clamp_(min=0)
            diagonal_I = diagonal_I - row_I.square()
            rows_BI[step] = row_I
            errors_BO[step] = error_O
        w_OI.addmm_(errors_BO.t(), rows_BI, alpha=-1)
        p_II.addmm_(rows_BI.t(), rows_BI, alpha=-1)
        norm_I = w_OI.square().sum(dim=0)  # computed anew, which removes the rounding errors of the updates
        diagonal_I = p_II.diagonal().clone()
    score_I = torch.where(is_kept_I, norm_I / diagonal_I, score_I)
    return Choice(is_kept_I, score_I.to(torch.float32))


def eliminate_units(w_OI: Tensor, p_II: Tensor, units: Units, num_kept: int) -> Choice:
    """Remove whole units greedily, the same number from every part; scores are those of
    `eliminate_columns_`."""
    width = units.width
    is_kept_U = torch.ones(units.num_units, dtype=torch.bool, device=w_OI.device)
    score_U = w_OI.new_zeros(units.num_units)
    num_left = [units.of_part] * units.num_parts
    num_kept_per_part = num_kept // units.num_parts
    for _ in range(units.num_units - num_kept):
        part_can_lose = torch.tensor([num > num_kept_per_part for num in num_left], device=is_kept_U.device)
        removable_U = is_kept_U & part_can_lose.repeat_interleave(units.of_part)
        loss_U = _unit_losses(w_OI, p_II, removable_U, width)
        unit = int(loss_U.argmin())
        score_U[unit] = loss_U[unit]
        is_kept_U[unit] = False
        num_left[unit // units.of_part] -= 1
        inside = slice(unit * width, (unit + 1) * width)
        factor_CI = torch.linalg.solve(p_II[inside, inside], p_II[inside])
        w_OI = w_OI - w_OI[:, inside] @ factor_CI
        p_II = p_II - p_II[:, inside] @ factor_CI
        w_OI[:, inside] = 0
    next_loss_U = _unit_losses(w_OI, p_II, is_kept_U, width)
    return Choice(is_kept_U, torch.where(is_kept_U, next_loss_U, score_U).to(torch.float32))


def _unit_losses(w_OI: Tensor, p_II: Tensor, removable_U: Tensor, width: int) -> Tensor:
    """Return tr(W_S (P_SS)^-1 W_S^T) of the removable units and infinity for the others, [U]."""
    index_V = removable_U.nonzero().squeeze(1)
    num_units = len(removable_U)
    blocks_VCC = p_II.view(num_units, width, num_units, width)[index_V, :, index_V, :]
    w_VCO = w_OI.view(-1, num_units, width).permute(1, 2, 0)[index_V]
    losses_V = (w_VCO * torch.linalg.solve(blocks_VCC, w_VCO)).sum(dim=(1, 2))
    return w_OI.new_full((num_units,), torch.inf).index_copy_(0, index_V, losses_V)
