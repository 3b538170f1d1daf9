"""Columns that stay keep their weights."""

from typing import Literal

from torch import Tensor

from compress.calibrate.stats import InputStats
from compress.methods.prune import COMPENSATIONS, Compensated, Compensation


@COMPENSATIONS.register("none")
class NoCompensation(Compensation):
    kind: Literal["none"] = "none"

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: InputStats) -> Compensated:
        return Compensated(w_OI[:, kept_I])
