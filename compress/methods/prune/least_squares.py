"""The best weights over the inputs that stay (ZipLM, arXiv 2302.04089, and every second-order method before it).

    W' = argmin E | W x - W' x_K |^2  =  W H_:K (H_KK)^-1,      H = E[x x^T] + d I

so columns that stay answer for what they can predict of those that go. Damping adds d times the squared distance of W' from W_K and of the
removed columns from zero, the same problem that `obs` chooses by. Solved in float64.

Shapes: O out, I in, K inputs that stay.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.prune import COMPENSATIONS, Compensated, Compensation


@COMPENSATIONS.register("least_squares")
class LeastSquares(Compensation):
    kind: Literal["least_squares"] = "least_squares"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        """Raises UsageError: H holds NaN or infinity."""
        h_II = stats[SecondMoment].mean().to(torch.float64)
        alive_I = h_II.diagonal() != 0
        if not bool((alive_I & ~kept_I).any()):  # nothing goes that ever fired
            return Compensated(w_OI[:, kept_I])
        h_II.diagonal().add_(self.damping * h_II.diagonal()[alive_I].mean())
        h_IK = h_II[:, kept_I]
        lower_KK, failed = torch.linalg.cholesky_ex(h_IK[kept_I])
        moved_OK = torch.cholesky_solve(
            (w_OI[:, ~kept_I].to(torch.float64) @ h_IK[~kept_I]).t(), lower_KK
        ).t()
        if failed != 0 or not bool(torch.isfinite(moved_OK).all()):
            raise UsageError(
                "the second moment of a layer's inputs cannot be factorised: the calibration data drives the model to NaN or infinity. "
                "Check the checkpoint, or compute in float32."
            )
        return Compensated((w_OI[:, kept_I].to(torch.float64) + moved_OK).to(torch.float32))
