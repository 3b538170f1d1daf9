"""Weight times activation, the score of Wanda (arXiv 2306.11695), summed over the columns of a unit.

    score(u) = sum over its columns i of  sum_o |W_oi|  *  sqrt(E[x_i^2])

The paper removes single weights by |W_oi| ||x_i||; added up over outputs and over the columns that go together, it ranks structure, as the
comparisons in FLAP (arXiv 2312.11983) have it.
"""

from typing import Literal

from compress.calibrate.stats import SecondMoment, Stat
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer


@SCORERS.register("wanda")
class Wanda(Scorer):
    kind: Literal["wanda"] = "wanda"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        score_I = candidates.w_OI.abs().sum(dim=0) * candidates.stats[SecondMoment].mean().diagonal().sqrt()
        score_U = score_I.view(-1, units.width).sum(dim=1)
        return Choice(units.best(score_U, num_kept), score_U)
