"""Units at random: the baseline that every other score has to beat. What is drawn depends on the seed, the layer and the linear alone."""

from typing import Literal

import torch

from compress.calibrate.stats import SecondMoment, Stat
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer


@SCORERS.register("random")
class RandomUnits(Scorer):
    kind: Literal["random"] = "random"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        """Among units that do something."""
        units = candidates.units
        alive_I = (candidates.stats[SecondMoment].mean().diagonal() != 0) & (candidates.w_OI != 0).any(dim=0)
        alive_U = alive_I.view(-1, units.width).any(dim=1)
        score_U = (torch.rand(units.num_units, generator=candidates.generator) + 1e-3).to(
            alive_U.device
        ) * alive_U
        return Choice(units.best(score_U, num_kept), score_U)
