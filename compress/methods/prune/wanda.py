"""Weight times activation, the score of Wanda (arXiv 2306.11695), summed over the columns of a unit.

    score(u) = sum over its columns i of  sum_o |W_oi|  *  sqrt(E[x_i^2])

The paper removes single weights by |W_oi| ||x_i||; added up over outputs and over the columns that go together, it ranks structure, as the
comparisons in FLAP (arXiv 2312.11983) have it.
"""

from collections.abc import Mapping
from typing import Literal

from compress.calibrate.stats import SecondMoment, StatFactory
from compress.methods.prune import SCORERS, Candidates, Choice
from compress.recipe import Spec


@SCORERS.register("wanda")
class Wanda(Spec):
    kind: Literal["wanda"] = "wanda"

    @property
    def gradient_samples(self) -> int:
        return 0

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        moment = candidates.stats["second_moment"]
        units = candidates.units
        assert isinstance(moment, SecondMoment)
        score_I = candidates.w_OI.abs().sum(dim=0) * moment.mean().diagonal().sqrt()
        score_U = score_I.view(-1, units.width).sum(dim=1)
        return Choice(units.best(score_U, num_kept), score_U)
