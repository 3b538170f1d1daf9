"""Columns that stay keep their weights."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from compress.calibrate.stats import Stat, StatFactory
from compress.methods.prune import COMPENSATIONS, Compensated
from compress.recipe import Spec


@COMPENSATIONS.register("none")
class NoCompensation(Spec):
    kind: Literal["none"] = "none"

    @property
    def needs_bias(self) -> bool:
        return False

    def stats(self) -> Mapping[str, StatFactory]:
        return {}

    def compensate(self, w_OI: Tensor, kept_I: Tensor, stats: Mapping[str, Stat]) -> Compensated:
        return Compensated(w_OI[:, kept_I])
