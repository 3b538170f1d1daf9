"""Activation score of Minitron (arXiv 2407.14679): a unit matters as much as what it writes is large.

    score(u) = sqrt( sum over its columns i of E[x_i^2] )

x_i are inputs of the linear that reads the unit: channels of the FFN behind the gate, outputs of attention heads. The paper takes norms
over the batch of means over the sequence; here both are the root of the mean square, the diagonal of a moment that is there anyway. What
the reading weights make of the inputs is not looked at.
"""

from typing import Literal

from compress.calibrate.stats import SecondMoment, Stat
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer


@SCORERS.register("activation")
class Activation(Scorer):
    kind: Literal["activation"] = "activation"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        alive_I = (candidates.w_OI != 0).any(dim=0)  # what nothing reads, however large it is, does nothing
        score_U = (
            (candidates.stats[SecondMoment].mean().diagonal() * alive_I)
            .view(-1, units.width)
            .sum(dim=1)
            .sqrt()
        )
        return Choice(units.best(score_U, num_kept), score_U)
