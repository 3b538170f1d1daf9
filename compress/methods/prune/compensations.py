"""Compensations: the weights and the bias of a linear after some of its input columns were removed.

    none            W' = W_K
    bias            W' = W_K,   b' = b + W_R E[x_R]                               FLAP, arXiv 2312.11983
    least_squares   W' = argmin E | W x - W' x_K |^2  =  W H_:K (H_KK)^-1         ZipLM, arXiv 2302.04089

K are the columns that stay, R those that are removed, and H = E[x x^T] + d I.

Of all constants the mean leaves the least squared error, so `bias` never does worse than `none` on the text
that it is measured on. Only linears that can have a bias can have this one: `attn.o` and `ffn.down` of Llama,
by `attention_bias` and `mlp_bias` of its config, and `attn.o` of Qwen3.

With `least_squares` the columns that stay take over what they can predict of those that are removed, as in
every second-order method since optimal brain surgeon. Its damping adds d times the squared distance of W'
from W_K and of the removed columns from zero: the same problem that the score `obs` chooses by. It is solved
in float64, as W' = W_K + W_R H_RK (H_KK)^-1.

Only the one linear changes here; `models/pruning.py` slices the others.

Shapes: O out, I in, K inputs that stay.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import NOT_FINITE, InputStats, Mean, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.prune import COMPENSATIONS, Compensated, Compensation


@COMPENSATIONS.register("none")
class NoCompensation(Compensation):
    """The columns that stay keep their weights."""

    kind: Literal["none"] = "none"

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        return Compensated(w_OI[:, kept_I])


@COMPENSATIONS.register("bias")
class BiasCompensation(Compensation):
    """The bias takes the mean contribution of the columns that are removed."""

    kind: Literal["bias"] = "bias"

    @property
    def needs_bias(self) -> bool:
        return True

    def needs(self) -> tuple[type[Stat], ...]:
        return (Mean,)

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        return Compensated(w_OI[:, kept_I], w_OI[:, ~kept_I] @ stats[Mean].mean()[~kept_I])


@COMPENSATIONS.register("least_squares")
class LeastSquares(Compensation):
    """The columns that stay take the weights with the least squared output error."""

    kind: Literal["least_squares"] = "least_squares"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        """Return the least-squares weights of the columns that stay.

        Raises:
            UsageError: H holds NaN or infinity.
        """
        h_II = stats[SecondMoment].mean().to(torch.float64)
        is_alive_I = h_II.diagonal() != 0
        if not bool((is_alive_I & ~kept_I).any()):  # every removed input was zero on all tokens
            return Compensated(w_OI[:, kept_I])
        h_II.diagonal().add_(self.damping * h_II.diagonal()[is_alive_I].mean())
        h_IK = h_II[:, kept_I]
        removed_OK = w_OI[:, ~kept_I].to(torch.float64) @ h_IK[~kept_I]
        lower_KK, failed = torch.linalg.cholesky_ex(h_IK[kept_I])
        moved_OK = torch.cholesky_solve(removed_OK.t(), lower_KK).t()
        if failed != 0 or not bool(torch.isfinite(moved_OK).all()):
            raise UsageError(NOT_FINITE)
        return Compensated((w_OI[:, kept_I].to(torch.float64) + moved_OK).to(torch.float32))
