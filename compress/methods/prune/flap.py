"""Fluctuation of a unit's contribution, the score of FLAP (arXiv 2312.11983): what a bias could not stand for.

    score(u) = sum over its columns i of  Var[x_i]  *  sum_o W_oi^2

An input that hardly moves can be replaced by its mean, which `compensate: bias` adds to the linear's bias; the paper's method is this score
with that compensation. Its normalisation across layers is left out: every layer keeps the same number.
"""

from typing import Literal

from compress.calibrate.stats import Mean, SecondMoment, Stat
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer


@SCORERS.register("flap")
class Flap(Scorer):
    kind: Literal["flap"] = "flap"

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, Mean

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        variance_I = (
            candidates.stats[SecondMoment].mean().diagonal() - candidates.stats[Mean].mean().square()
        ).clamp(min=0)
        score_U = (variance_I * candidates.w_OI.square().sum(dim=0)).view(-1, units.width).sum(dim=1)
        return Choice(units.best(score_U, num_kept), score_U)
