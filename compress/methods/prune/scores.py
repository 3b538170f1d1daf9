"""Scores that are one formula in the weights and the statistics of the inputs. The units with the largest
scores stay.

    activation   score(u) = sqrt( sum_i E[x_i^2] )                       Minitron, arXiv 2407.14679
    wanda        score(u) = sum_i  sum_o |W_oi|  *  sqrt(E[x_i^2])       Wanda, arXiv 2306.11695
    flap         score(u) = sum_i  Var[x_i]  *  sum_o W_oi^2             FLAP, arXiv 2312.11983
    random       score(u) = a number from [0, 1)                         the baseline of every other score

i runs over the columns of unit u and o over the outputs. W is the linear whose columns are removed (`attn.o`,
`ffn.down`), and x its input: outputs of attention heads, or FFN channels after the gate. The moments come
from one observation of the layer, shared by all scores; none of these formulas takes into account that the
columns that stay can be changed (`obs` does) or what later layers make of an error (`taylor` does).

Memory layout: the columns of a unit are adjacent, so a score per column [I] becomes one per unit [U] by
summing a view [U, I / U]. Shapes: O out, I in, U units.
"""

from typing import Literal

import torch
from torch import Tensor

from compress.calibrate.stats import Mean, SecondMoment, Stat
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer


@SCORERS.register("activation")
class Activation(Scorer):
    """Units whose activations are large stay.

    The paper averages norms over batch and sequence; this is the root of the mean square, from the moment
    that is collected anyway. The weights that read the unit count only in that a column of zeros has no
    score.
    """

    kind: Literal["activation"] = "activation"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        is_read_I = (candidates.w_OI != 0).any(dim=0)
        score_U = _sum_of_columns(candidates, _mean_square(candidates) * is_read_I).sqrt()
        return _largest(candidates, score_U, num_kept)


@SCORERS.register("wanda")
class Wanda(Scorer):
    """Units with a large product of weights and activations stay.

    The paper removes single weights by |W_oi| ||x_i||. Summed over the outputs and the columns of a unit the
    product ranks structure, as in the comparisons of FLAP.
    """

    kind: Literal["wanda"] = "wanda"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        score_I = candidates.w_OI.abs().sum(dim=0) * _mean_square(candidates).sqrt()
        return _largest(candidates, _sum_of_columns(candidates, score_I), num_kept)


@SCORERS.register("flap")
class Flap(Scorer):
    """Units whose contribution fluctuates much stay.

    An input that hardly varies can be replaced by its mean, which `compensate: bias` adds to the linear's
    bias; the paper's method is this score with that compensation. Its normalisation across layers is left
    out: every layer keeps the same number of units.
    """

    kind: Literal["flap"] = "flap"

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, Mean

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        variance_I = (_mean_square(candidates) - candidates.stats[Mean].mean().square()).clamp(min=0)
        score_I = variance_I * candidates.w_OI.square().sum(dim=0)
        return _largest(candidates, _sum_of_columns(candidates, score_I), num_kept)


@SCORERS.register("random")
class RandomUnits(Scorer):
    """Units drawn at random stay, among those that do something; the draw depends on the seed, the layer and
    the linear alone."""

    kind: Literal["random"] = "random"

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        units = candidates.units
        is_alive_I = (_mean_square(candidates) != 0) & (candidates.w_OI != 0).any(dim=0)
        is_alive_U = is_alive_I.view(-1, units.width).any(dim=1)
        drawn_U = (
            torch.rand(units.num_units, generator=candidates.generator) + 1e-3
        )  # above the 0 of dead units
        return _largest(candidates, drawn_U.to(is_alive_U.device) * is_alive_U, num_kept)


def _mean_square(candidates: Candidates) -> Tensor:
    """Return E[x_i^2] of every input, float32 [I]."""
    return candidates.stats[SecondMoment].mean().diagonal()


def _sum_of_columns(candidates: Candidates, score_I: Tensor) -> Tensor:
    """Return the sum of the scores of each unit's columns, [U]."""
    return score_I.view(-1, candidates.units.width).sum(dim=1)


def _largest(candidates: Candidates, score_U: Tensor, num_kept: int) -> Choice:
    """Choose the units with the largest scores."""
    return Choice(candidates.units.best(score_U, num_kept), score_U)
