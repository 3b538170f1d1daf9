"""GPTAQ (arXiv 2504.02692): calibrate a linear to what the source model gives, not to what its own weights make of a compressed input.

By the time a layer is compressed its input is x, behind compressed layers, where the source model has x_s. The best quantized row q of a
row w then answers for both errors, its own and those it inherited:

    E |q x - w x_s|^2 = (q - w*) H (q - w*)^T + what no q changes,    H = E[x x^T]
    w* = w + w C H^-1,                                                C = E[(x_s - x) x^T]

So it is the ordinary problem with another target w*, whatever rounds and refines towards it; the paper works the same term into GPTQ's
column updates. `strength` a takes w + a w C H^-1: a part of the way, as the paper's own implementation does, because C is estimated from
few tokens, and because an error that later layers would have absorbed is paid for twice if each layer corrects it wholly.

H is damped as GPTQ damps it: a share of mean(diag H) on the diagonal keeps w* near w where the inputs hardly reach. Solved in float64,
since the inverse enlarges what float32 sums leave in C. An input that never fires has no column in C and gets no correction.

Shapes: O out, I in.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import CrossMoment, InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.quantize import TARGETS, RoundingTarget


@TARGETS.register("gptaq")
class Gptaq(RoundingTarget):
    kind: Literal["gptaq"] = "gptaq"
    strength: float = Field(
        0.5,
        gt=0,
        le=1,
        description="how far towards the weights that undo the error of the layers before: 1 all the way",
    )
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, CrossMoment

    def target(self, w_OI: Tensor, stats: InputStats) -> Tensor:
        h_II = stats[SecondMoment].mean().to(torch.float64)
        w_f64_OI = w_OI.to(torch.float64)
        alive_I = h_II.diagonal() != 0
        if not bool(alive_I.any()):
            return w_OI
        h_II.diagonal().add_(self.damping * h_II.diagonal()[alive_I].mean())
        lower_II, failed = torch.linalg.cholesky_ex(h_II)
        shift_OI = torch.cholesky_solve(
            (w_f64_OI @ stats[CrossMoment].mean().to(torch.float64)).t(), lower_II
        ).t()
        if failed != 0 or not bool(torch.isfinite(shift_OI).all()):
            raise UsageError(
                "the moments of a layer's inputs are not finite: the calibration data drives the model to NaN or infinity. Check the "
                "checkpoint, or compute in float32."
            )
        return (w_f64_OI + self.strength * shift_OI).to(torch.float32)
