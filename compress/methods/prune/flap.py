"""Fluctuation of a unit's contribution, the score of FLAP (arXiv 2312.11983): what a bias could not stand for.

    score(u) = sum over its columns i of  Var[x_i]  *  sum_o W_oi^2

An input that hardly moves can be replaced by its mean, which `compensate: bias` adds to the linear's bias; the paper's method is this score
with that compensation. Its normalisation across layers is left out: every layer keeps the same number.
"""

from collections.abc import Mapping
from typing import Literal

from compress.calibrate.stats import Mean, SecondMoment, StatFactory
from compress.methods.prune import SCORERS, Candidates, Choice
from compress.recipe import Spec


@SCORERS.register("flap")
class Flap(Spec):
    kind: Literal["flap"] = "flap"

    @property
    def gradient_samples(self) -> int:
        return 0

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment, "mean": Mean}

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        moment = candidates.stats["second_moment"]
        mean = candidates.stats["mean"]
        units = candidates.units
        assert isinstance(moment, SecondMoment)
        assert isinstance(mean, Mean)
        variance_I = (moment.mean().diagonal() - mean.mean().square()).clamp(min=0)
        score_U = (variance_I * candidates.w_OI.square().sum(dim=0)).view(-1, units.width).sum(dim=1)
        return Choice(units.best(score_U, num_kept), score_U)
