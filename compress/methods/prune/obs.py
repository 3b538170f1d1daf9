"""Second order, greedily: remove the unit that costs least once the columns that stay have made up for it, then look again.

For the output error tr((W - W') H (W - W')^T) with H = E[x x^T] (damped) and P = H^-1, removing the columns S of a unit costs at best

    loss(S) = tr( W_S (P_SS)^-1 W_S^T ),    W <- W - W_S (P_SS)^-1 P_S,    P <- P - P_:S (P_SS)^-1 P_S:

(optimal brain surgeon; for structure in ZipLM, arXiv 2302.04089). The losses of successive removals add up to that of the least-squares
solution over what is left. Only the choice is made here: `compensate: least_squares` finds the same weights from H, in one solve.

Single columns, thousands of them, are taken in blocks of B: the updates of W and P wait, and those of what decides, the norms of W's
columns and the diagonal of P, are made one by one from the vectors that wait. The order is the same as without blocks; a step reads W
once, O I numbers, where it would read and write W and P.

All in float64: P is the inverse of a matrix whose eigenvalues spread over many orders. Shapes: O out, I in, U units, C columns of a unit.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer
from compress.models.pruning import Units


@SCORERS.register("obs")
class Obs(Scorer):
    kind: Literal["obs"] = "obs"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")
    block_size: int = Field(
        64,
        ge=1,
        description="columns between two updates of the whole matrices; changes speed, not the choice",
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        h_II = candidates.stats[SecondMoment].mean()
        w_OI = torch.where(
            h_II.diagonal() == 0, 0.0, candidates.w_OI.to(torch.float64)
        )  # what never fires costs nothing
        inverse_II = inverse(h_II, damping=self.damping)
        del h_II  # of a wide FFN, the half of a gigabyte and more
        if units.width == 1 and units.num_parts == 1:
            return eliminate_columns_(
                w_OI, inverse_II, units.num_units - num_kept, block_size=self.block_size
            )
        return eliminate_units(w_OI, inverse_II, units, num_kept)


def inverse(h_II: Tensor, *, damping: float) -> Tensor:
    """(H + d I)^-1 in float64, with d a share of mean(diag H), inputs that never fire not counted.

    Raises:
        UsageError: H holds NaN or infinity.
    """
    alive_I = h_II.diagonal() != 0
    mean = h_II.diagonal()[alive_I].mean() if bool(alive_I.any()) else h_II.new_ones(())
    damped_II = h_II.to(torch.float64, copy=True)
    damped_II.diagonal().add_(damping * mean)
    lower_II, failed = torch.linalg.cholesky_ex(damped_II)
    if failed != 0:
        raise UsageError(
            "the second moment of a layer's inputs cannot be factorised: the calibration data drives the model to NaN or infinity. Check "
            "the checkpoint, or compute in float32."
        )
    return torch.cholesky_inverse(lower_II)


def eliminate_columns_(w_OI: Tensor, p_II: Tensor, num_removed: int, *, block_size: int) -> Choice:
    """Greedy removal of single columns; weights and inverse are used up. Scores are losses: of what goes when it went, of what stays if
    it were the next."""
    alive_I = torch.ones(w_OI.shape[1], dtype=torch.bool, device=w_OI.device)
    score_I = w_OI.new_zeros(w_OI.shape[1])
    norm_I = w_OI.square().sum(dim=0)
    diagonal_I = p_II.diagonal().clone()
    for begin in range(0, num_removed, block_size):
        num = min(block_size, num_removed - begin)
        rows_BI = w_OI.new_zeros(num, w_OI.shape[1])
        errors_BO = w_OI.new_zeros(num, w_OI.shape[0])
        for step in range(num):
            waiting_BI = rows_BI[:step]
            waiting_BO = errors_BO[:step]
            loss_I = (norm_I / diagonal_I).masked_fill(~alive_I, torch.inf)
            j = loss_I.argmin().view(1)  # stays on the device: a step waits for no copy
            score_I[j] = loss_I[j]
            alive_I[j] = False
            p_B = waiting_BI.index_select(1, j)
            row_I = p_II.index_select(0, j).squeeze(0) - (p_B * waiting_BI).sum(dim=0)
            error_O = w_OI.index_select(1, j).squeeze(1) - (p_B * waiting_BO).sum(dim=0)
            root = row_I.index_select(0, j).sqrt()
            row_I = row_I / root
            error_O = error_O / root
            along_I = error_O @ w_OI - (waiting_BO @ error_O) @ waiting_BI
            norm_I = (norm_I - 2 * row_I * along_I + error_O.square().sum() * row_I.square()).clamp_(min=0)
            diagonal_I = diagonal_I - row_I.square()
            rows_BI[step] = row_I
            errors_BO[step] = error_O
        w_OI.addmm_(errors_BO.t(), rows_BI, alpha=-1)
        p_II.addmm_(rows_BI.t(), rows_BI, alpha=-1)
        norm_I, diagonal_I = w_OI.square().sum(dim=0), p_II.diagonal().clone()  # exact again
    score_I = torch.where(alive_I, norm_I / diagonal_I, score_I)
    return Choice(alive_I, score_I.to(torch.float32))


def eliminate_units(w_OI: Tensor, p_II: Tensor, units: Units, num_kept: int) -> Choice:
    """Greedy removal of whole units, of every part the same number; scores as in `eliminate_columns_`."""
    width = units.width
    alive_U = torch.ones(units.num_units, dtype=torch.bool, device=w_OI.device)
    score_U = w_OI.new_zeros(units.num_units)
    left = [units.of_part] * units.num_parts
    may_lose = num_kept // units.num_parts
    for _ in range(units.num_units - num_kept):
        open_U = alive_U & torch.tensor(
            [each > may_lose for each in left], device=alive_U.device
        ).repeat_interleave(units.of_part)
        loss_U = _unit_losses(w_OI, p_II, open_U, width)
        unit = int(loss_U.argmin())
        score_U[unit] = loss_U[unit]
        alive_U[unit] = False
        left[unit // units.of_part] -= 1
        inside = slice(unit * width, (unit + 1) * width)
        factor_CI = torch.linalg.solve(p_II[inside, inside], p_II[inside])
        w_OI = w_OI - w_OI[:, inside] @ factor_CI
        p_II = p_II - p_II[:, inside] @ factor_CI
        w_OI[:, inside] = 0
    left_U = _unit_losses(w_OI, p_II, alive_U, width)
    return Choice(alive_U, torch.where(alive_U, left_U, score_U).to(torch.float32))


def _unit_losses(w_OI: Tensor, p_II: Tensor, open_U: Tensor, width: int) -> Tensor:
    """tr(W_S (P_SS)^-1 W_S^T) of the open units, infinity for the others."""
    index_V = open_U.nonzero().squeeze(1)
    num_units = len(open_U)
    blocks_VCC = p_II.view(num_units, width, num_units, width)[index_V, :, index_V, :]
    w_VCO = w_OI.view(-1, num_units, width).permute(1, 2, 0)[index_V]
    losses_V = (w_VCO * torch.linalg.solve(blocks_VCC, w_VCO)).sum(dim=(1, 2))
    return w_OI.new_full((num_units,), torch.inf).index_copy_(0, index_V, losses_V)
