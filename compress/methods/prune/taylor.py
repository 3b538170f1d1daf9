"""Predicted loss of removing a unit, from gradients (LLM-Pruner, arXiv 2305.11627; the squared form of arXiv
1906.10771).

Removing the columns S of a unit moves the output of its linear at position t by d_t = -W_S x_S,t. To second
order the model's loss moves by

    KL a token  ~  1/2 E[ sum_t (g_t . d_t)^2 ] / T,      g_t . d_t = - sum over i in S of  x_i,t (g_t W)_i

with g_t the gradient of the loss at that output for labels drawn from the model itself
(`calibrate/gradients.py`), and errors at different positions taken as uncorrelated
(`stages/budget/sensitivity.py` has the evidence for both). LLM-Pruner sums w dL/dw over a unit, which is the
same inner product, for labels from text.

Losses are in nats for every layer, so units of different layers compare. They are taken from the model before
anything is removed: what earlier layers lose in the same round is not in them.

Shapes: T tokens of one sample, U units, O out, I in.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.gradients import GradientVisitor
from compress.calibrate.stats import InputStats
from compress.methods.prune import SCORERS, Candidates, Choice, Scorer
from compress.models.decoder import DecoderLayer
from compress.models.linear_groups import LinearGroup
from compress.models.pruning import Units
from compress.recipe import MAX_SAMPLES


@SCORERS.register("taylor")
class Taylor(Scorer):
    """Units with the largest predicted loss stay."""

    kind: Literal["taylor"] = "taylor"
    num_samples: int = Field(
        32, ge=1, le=MAX_SAMPLES, description="samples of the calibration set that gradients are taken on"
    )

    @property
    def gradient_samples(self) -> int:
        return self.num_samples

    def choose(self, candidates: Candidates, num_kept: int) -> Choice:
        assert candidates.loss_U is not None, (
            "`stages/prune` predicts losses for scores with gradient_samples"
        )
        score_U = candidates.loss_U.to(candidates.w_OI.device)
        return Choice(candidates.units.best(score_U, num_kept), score_U)


class UnitLosses(GradientVisitor):
    """Predicts the loss of removing each unit from a backward pass; `units` are those of the linear group
    that reads each tap."""

    def __init__(self, units: Mapping[str, Units]) -> None:
        self._units = units
        self._sums: dict[tuple[int, str], Tensor] = {}
        self._num_tokens: dict[tuple[int, str], int] = {}

    @property
    def loss(self) -> dict[tuple[int, str], Tensor]:
        """Predicted losses of the units, (layer, tap) -> float32 [U], in nats of KL a token."""
        return {
            key: (total_U / (2 * self._num_tokens[key])).to(torch.float32)
            for key, total_U in sorted(self._sums.items())
        }

    def start_layer(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        """Do nothing: the losses need no statistics."""

    def add_sample(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        """Add the squared (g_t . d_t) of every unit over one sample, summed in float64."""
        if group.tap not in self._units:
            return
        key = (layer.layer_idx, group.tap)
        units = self._units[group.tap]
        moved_TI = x_TI.to(torch.float32) * sum(
            (g_TO @ layer.linear(name).weight).to(torch.float32) for name, g_TO in gradients.items()
        )
        moved_TU = moved_TI.view(len(x_TI), units.num_units, units.width).sum(dim=2)
        squares_U = moved_TU.square().sum(dim=0).to(torch.float64).cpu()
        self._sums[key] = self._sums[key] + squares_U if key in self._sums else squares_U
        self._num_tokens[key] = self._num_tokens.get(key, 0) + len(x_TI)
