"""How scorer and compensation meet a layer: one pass of the sequential runner, which removes units of the linears it is told to cut.

A rank decides about the linears whose statistics it has; what it decided goes to all, and every rank slices the whole layer. Units of both
halves of a layer are chosen on one observation: the FFN is looked at as it is behind attention with all its heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerState
from compress.calibrate.stats import Mean, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.prune import Candidates, Compensated, Compensation, Scorer
from compress.models.arch import Arch, LayerShape
from compress.models.pruning import HeadUnit, Units, add_biases_, head_units, keep_channels_, keep_heads_
from compress.quant.products import product

NUM_SHARES = 65
"""Points of the curve that stands for the scores of a layer with more units than that."""


@dataclass(frozen=True)
class Cut:
    """A linear, by whose columns units are chosen, and how many of them stay; `unit` names them."""

    linear: Literal["attn.o", "ffn.down"]
    unit: Literal["kv_group", "query_head", "channel"]
    num_kept: int

    @property
    def tap(self) -> str:
        return "attn_out" if self.linear == "attn.o" else "ffn_mid"

    def units(self, shape: LayerShape) -> Units:
        return Units(shape.intermediate_size) if self.unit == "channel" else head_units(shape, self.unit)

    def keep_(self, weights: dict[str, Tensor], shape: LayerShape, kept_U: Tensor, weight: Tensor) -> None:
        if self.unit == "channel":
            keep_channels_(weights, kept_U, weight)
        else:
            unit: HeadUnit = self.unit
            keep_heads_(weights, shape, unit, kept_U, weight)


class PrunePass:
    """`arch` is the model before, `pruned` after; `losses` are (layer, tap) -> [U] for a scorer that asks for them."""

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
        decided: dict[str, tuple[Tensor, Compensated, dict[str, Any]]] = {}
        for cut in self._cuts:
            if cut.tap in state.stats:
                try:
                    decided[cut.linear] = state.room.attempt(
                        partial(self._decide, cut, state), f"pruning {cut.linear}"
                    )
                except UsageError as error:
                    raise UsageError(f"layer {state.layer_idx}, {cut.linear}: {error}") from error
        for rank in range(state.ranks.size):
            decided |= state.ranks.broadcast(decided, source=rank)
        shape = self._arch.layers[state.layer_idx]
        add_biases_(state.weights, self._pruned, shape)
        for cut in self._cuts:
            kept_U, result, facts = decided[cut.linear]
            cut.keep_(state.weights, shape, kept_U, result.w_OK)
            if result.bias_O is not None:
                state.weights[f"{cut.linear}.bias"] = state.weights[f"{cut.linear}.bias"] + result.bias_O
            state.row(cut.linear).update(facts)

    def _decide(self, cut: Cut, state: LayerState) -> tuple[Tensor, Compensated, dict[str, Any]]:
        w_OI = state.weights[f"{cut.linear}.weight"]
        stats = state.stats[cut.tap]
        units = cut.units(self._arch.layers[state.layer_idx])
        generator = self._rng("prune", str(state.layer_idx), cut.linear)
        candidates = Candidates(w_OI, units, stats, generator, self._losses.get((state.layer_idx, cut.tap)))
        choice = self._scorer.choose(candidates, cut.num_kept)
        assert int(choice.kept_U.sum()) == cut.num_kept, "a scorer keeps as many as it is asked for"
        kept_I = units.columns(choice.kept_U)
        result = self._compensation.compensate(w_OI, kept_I, stats)
        mean = stats.get(Mean)
        mean_I = None if mean is None else mean.mean()
        facts = {
            "unit": cut.unit,
            "num_units": units.num_units,
            "num_kept": cut.num_kept,
            "error": lost(w_OI, kept_I, result, stats[SecondMoment].mean(), mean_I),
            **_score_facts(choice.kept_U, choice.score_U),
        }
        return choice.kept_U, result, facts


def lost(w_OI: Tensor, kept_I: Tensor, result: Compensated, h_II: Tensor, mean_I: Tensor | None) -> float:
    """E|W x - W' x_K - b|^2 / E|W x|^2."""
    signal = float((product(w_OI, h_II) * w_OI).sum())
    delta_OI = w_OI.clone()
    delta_OI[:, kept_I] -= result.w_OK
    error = float((product(delta_OI, h_II) * delta_OI).sum())
    if result.bias_O is not None:
        assert mean_I is not None, "a bias is found from the mean"
        moved_O = delta_OI @ mean_I
        error += float((result.bias_O.square() - 2 * result.bias_O * moved_O).sum())
    return round(max(error, 0.0) / signal, 6) if signal > 0 else 0.0


def _score_facts(kept_U: Tensor, score_U: Tensor) -> dict[str, Any]:
    """The share of the sum of scores that goes; of few units, all scores and which stay; of many, the share of the sum that the least of
    them have between them, at even steps from none to all."""
    scores_U = score_U.to(torch.float64).cpu()
    total = max(float(scores_U.sum()), torch.finfo(torch.float64).tiny)
    lost = {"score_lost": round(float(scores_U[~kept_U.cpu()].sum()) / total, 6)}
    if len(scores_U) <= NUM_SHARES:
        return {
            **lost,
            "scores": [_rounded(each) for each in scores_U.tolist()],
            "kept": kept_U.nonzero().squeeze(1).tolist(),
        }
    below = torch.cat([scores_U.new_zeros(1), scores_U.sort().values.cumsum(0)]) / total
    at = torch.linspace(0, len(scores_U), NUM_SHARES).round().long()
    return {**lost, "shares": [round(each, 6) for each in below[at].tolist()]}


def _rounded(value: float) -> float:
    """Six digits: what lies behind them is noise."""
    return float(f"{value:.6g}")
