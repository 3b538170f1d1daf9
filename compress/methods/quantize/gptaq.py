"""GPTAQ (arXiv 2504.02692): the rounding target that reproduces the source model's outputs from the
compressed model's inputs.

When a layer is compressed its input is x, computed by compressed layers, where the source model has x_s. The
best quantized row q of a row w then answers for both errors, its own and the inherited one:

    E |q x - w x_s|^2 = (q - w*) H (q - w*)^T + a constant,    H = E[x x^T]
    w* = w + w C H^-1,                                         C = E[(x_s - x) x^T]

So it is the ordinary problem with another target w*, for any rounder and refiner; the paper works the same
term into GPTQ's column updates. `strength` a takes w + a w C H^-1, a part of the way, as the paper's own code
does: C is estimated from few tokens, and an error that later layers would have absorbed is corrected more
than once if each layer corrects all of it.

H is damped as in GPTQ: a share of mean(diag H) on the diagonal keeps w* near w in directions that the inputs
hardly reach. Solved in float64, since the inverse enlarges the rounding errors of the float32 sums in C. An
input that is always zero has no column in C and gets no correction.

Shapes: O out, I in.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import NOT_FINITE, CrossMoment, InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.quantize import TARGETS, RoundingTarget


@TARGETS.register("gptaq")
class Gptaq(RoundingTarget):
    """Corrects the weights for the errors of the inputs."""

    kind: Literal["gptaq"] = "gptaq"
    strength: float = Field(
        0.5,
        gt=0,
        le=1,
        description="how far towards the weights that undo the error of the earlier layers: 1 is all the way",
    )
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, CrossMoment

    def target(self, w_OI: Tensor, stats: InputStats) -> Tensor:
        """Return w + strength * w C H^-1.

        Raises:
            UsageError: a moment holds NaN or infinity.
        """
        h_II = stats[SecondMoment].mean().to(torch.float64)
        w_f64_OI = w_OI.to(torch.float64)
        is_alive_I = h_II.diagonal() != 0
        if not bool(is_alive_I.any()):
            return w_OI
        h_II.diagonal().add_(self.damping * h_II.diagonal()[is_alive_I].mean())
        lower_II, failed = torch.linalg.cholesky_ex(h_II)
        shift_OI = torch.cholesky_solve(
            (w_f64_OI @ stats[CrossMoment].mean().to(torch.float64)).t(), lower_II
        ).t()
        if failed != 0 or not bool(torch.isfinite(shift_OI).all()):
            raise UsageError(NOT_FINITE)
        return (w_f64_OI + self.strength * shift_OI).to(torch.float32)
