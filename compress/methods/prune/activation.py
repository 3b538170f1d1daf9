"""Activation score of Minitron (arXiv 2407.14679): a unit matters as much as what it writes is large.

    score(u) = sqrt( sum over its columns i of E[x_i^2] )

x_i are inputs of the linear that reads the unit: channels of the FFN behind the gate, outputs of attention heads. The paper takes norms
over the batch of means over the sequence; here both are the root of the mean square, the diagonal of a moment that is there anyway. What
the reading weights make of the inputs is not looked at.
"""

from collections.abc import Mapping
from typing import Literal

from compress.calibrate.stats import SecondMoment, StatFactory
from compress.methods.prune import SCORERS, Candidates, Choice
from compress.recipe import Spec


@SCORERS.register("activation")
class Activation(Spec):
    kind: Literal["activation"] = "activation"

    @property
    def gradient_samples(self) -> int:
        return 0

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        moment = candidates.stats["second_moment"]
        units = candidates.units
        assert isinstance(moment, SecondMoment)
        alive_I = (candidates.w_OI != 0).any(dim=0)  # what nothing reads, however large it is, does nothing
        score_U = (moment.mean().diagonal() * alive_I).view(-1, units.width).sum(dim=1).sqrt()
        return Choice(units.best(score_U, num_kept), score_U)
