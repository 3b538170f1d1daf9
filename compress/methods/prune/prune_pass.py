"""The pass of the sequential runner that prunes a layer: it scores and removes units of each linear it is
given a `Cut` for.

Each rank decides about the linears whose statistics it holds, sends its decisions to all ranks, and every
rank slices the whole layer. The units of both halves of a layer are chosen from one observation: the inputs
of the FFN are those after attention with all its heads.

Shapes: O out, I in, K inputs that stay, U units.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerState
from compress.calibrate.stats import Mean, SecondMoment, Stat
from compress.digest import significant
from compress.errors import UsageError
from compress.methods.prune import Candidates, Compensated, Compensation, Scorer
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.pruning import HeadUnit, Units, add_biases_, head_units, keep_channels_, keep_heads_
from compress.quant.products import product

NUM_SHARES = 65
"""Points of the curve that the report shows in place of the scores themselves, for a layer with more units
than that."""


@dataclass(frozen=True)
class Cut:
    """How many units of which kind stay in one linear; units are sets of its columns."""

    linear: Literal["attn.o", "ffn.down"]
    unit: Literal["kv_group", "query_head", "channel"]
    num_kept: int

    @property
    def tap(self) -> str:
        """Tap at which the linear's input is observed."""
        return "attn_out" if self.linear == "attn.o" else "ffn_mid"

    def units(self, shape: LayerShape) -> Units:
        """Return the units of the linear in a layer of this shape."""
        return Units(shape.intermediate_size) if self.unit == "channel" else head_units(shape, self.unit)

    def keep_(self, weights: dict[str, Tensor], shape: LayerShape, kept_U: Tensor, w_OK: Tensor) -> None:
        """Remove all other units from the layer's weights, in place; `w_OK` replaces the columns of the
        linear that stay."""
        if self.unit == "channel":
            keep_channels_(weights, kept_U, w_OK)
        else:
            unit: HeadUnit = self.unit
            keep_heads_(weights, shape, unit, kept_U, w_OK)


Decision = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]
"""Outcome of pruning one linear's inputs, in the form that is sent between ranks: kept units (bool [U]),
weights [O, kept], bias [O] or None, facts."""


class PrunePass:
    """A `LayerPass` that removes units of heads and channels."""

    def __init__(
        self,
        cuts: tuple[Cut, ...],
        scorer: Scorer,
        compensation: Compensation,
        arch: Arch,
        pruned: Arch,
        rng: Callable[..., torch.Generator],
        losses: Mapping[tuple[int, str], Tensor],
    ) -> None:
        """Store what to prune and how.

        Args:
            arch: the model before pruning; `pruned` is the model after it.
            rng: makes the generator of a path of names (`Context.rng`).
            losses: predicted losses, (layer, tap) -> [U]; empty unless the scorer has `gradient_samples`.
        """
        self._cuts = cuts
        self._scorer = scorer
        self._compensation = compensation
        self._arch = arch
        self._pruned = pruned
        self._rng = rng
        self._losses = losses

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, *self._scorer.needs(), *self._compensation.needs()

    def apply(self, state: LayerState) -> None:
        """Prune the layer and fill its rows of the report.

        Raises:
            UsageError: the statistics hold NaN or infinity.
        """
        decided: dict[str, Decision] = {}
        for cut in self._cuts:
            if cut.tap in state.stats:
                try:
                    decided[cut.linear] = state.run.memory.retry_on_oom(
                        partial(self._decide, cut, state), f"pruning {cut.linear}"
                    )
                except UsageError as error:
                    raise UsageError(f"layer {state.layer_idx}, {cut.linear}: {error}") from error
        for of_rank in state.run.ranks.all_gather(decided):
            decided |= of_rank
        shape = self._arch.layers[state.layer_idx]
        add_biases_(state.weights, self._pruned, shape)
        for cut in self._cuts:
            if cut.linear not in shape.linears:
                continue
            kept_U, w_OK, bias_O, facts = decided[cut.linear]
            cut.keep_(state.weights, shape, kept_U, w_OK)
            if bias_O is not None:
                state.weights[f"{cut.linear}.bias"] = state.weights[f"{cut.linear}.bias"] + bias_O
            state.row(cut.linear).update(facts)

    def _decide(self, cut: Cut, state: LayerState) -> Decision:
        """Return what pruning the inputs of one linear keeps and leaves, and facts for the report."""
        w_OI = state.weights[f"{cut.linear}.weight"]
        stats = state.stats[cut.tap]
        units = cut.units(self._arch.layers[state.layer_idx])
        generator = self._rng("prune", str(state.layer_idx), cut.linear)
        candidates = Candidates(w_OI, units, stats, generator, self._losses.get((state.layer_idx, cut.tap)))
        choice = self._scorer.choose(candidates, cut.num_kept)
        assert int(choice.kept_U.sum()) == cut.num_kept, "a scorer keeps exactly num_kept units"
        kept_I = units.columns(choice.kept_U)
        result = self._compensation.compensate(w_OI, kept_I, stats)
        mean = stats.get(Mean)
        mean_I = None if mean is None else mean.mean()
        facts = {
            "unit": cut.unit,
            "num_units": units.num_units,
            "num_kept": cut.num_kept,
            "error": relative_error(w_OI, kept_I, result, stats[SecondMoment].mean(), mean_I),
            **_score_facts(choice.kept_U, choice.score_U),
        }
        return choice.kept_U, result.w_OK, result.bias_O, facts


def relative_error(
    w_OI: Tensor, kept_I: Tensor, result: Compensated, h_II: Tensor, mean_I: Tensor | None
) -> float:
    """Return E|W x - W' x_K - b|^2 / E|W x|^2, from H = E[x x^T] and E[x]; 0 for dead inputs.

    With D = W - W' (W' padded with zeros) the numerator is tr(D H D^T) + |b|^2 - 2 b . D E[x].
    """
    signal = float((product(w_OI, h_II) * w_OI).sum())
    delta_OI = w_OI.clone()
    delta_OI[:, kept_I] -= result.w_OK
    error = float((product(delta_OI, h_II) * delta_OI).sum())
    if result.bias_O is not None:
        assert mean_I is not None, "a compensation that returns a bias needs the mean"
        moved_O = delta_OI @ mean_I
        error += float((result.bias_O.square() - 2 * result.bias_O * moved_O).sum())
    return round(max(error, 0.0) / signal, 6) if signal > 0 else 0.0


def _score_facts(kept_U: Tensor, score_U: Tensor) -> dict[str, Any]:
    """Return what the report shows of the scores.

    `score_lost` is the share of their sum that is removed. Up to NUM_SHARES units, `scores` are all of them
    and `kept` the indices that stay; above, `shares` is the share of the sum that the lowest units have, from
    none to all units in even steps.
    """
    scores_U = score_U.to(torch.float64).cpu()
    total = max(float(scores_U.sum()), torch.finfo(torch.float64).tiny)
    score_lost = round(float(scores_U[~kept_U.cpu()].sum()) / total, 6)
    if len(scores_U) <= NUM_SHARES:
        return {
            "score_lost": score_lost,
            "scores": [significant(score) for score in scores_U.tolist()],
            "kept": kept_U.nonzero().squeeze(1).tolist(),
        }
    below = torch.cat([scores_U.new_zeros(1), scores_U.sort().values.cumsum(0)]) / total
    at = torch.linspace(0, len(scores_U), NUM_SHARES).round().long()
    return {"score_lost": score_lost, "shares": [round(share, 6) for share in below[at].tolist()]}
