"""How smoothers and rounders meet a layer: passes over `LayerState`, each a step of the sequential runner.

A smoother's scale is folded into the producer and the statistics move along with it (H' = H / (s s^T)), so the rounder behind it needs no
second observation. Linears that share an input are rounded as one matrix, stacked along O, and share the scale of a static input; no
block of rows that has one scale reaches from a linear into the next.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compress.calibrate.sequential import LayerState
from compress.calibrate.stats import AbsMax, SecondMoment, Stat, StatFactory
from compress.errors import UsageError
from compress.methods import Refiner, Rounded, Rounder, Smoother, Target
from compress.models.surgery import fold_
from compress.quant.numerics import nearest_weight, output_error, static_input_scale, whole_blocks
from compress.quant.scheme import QuantizedWeight, Scheme


class SmoothPass:
    """Finds and folds the smoother's scale for every pair of a layer, and moves the statistics along."""

    def __init__(self, smoother: Smoother, scheme: Scheme, stored_dtype: torch.dtype) -> None:
        self._smoother, self._scheme, self._stored_dtype = smoother, scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        return self._smoother.stats()

    def apply(self, state: LayerState) -> None:
        for pair in state.pairs:
            stacked_OI = torch.cat([state.weights[f"{linear}.weight"] for linear in pair.linears])
            stats = state.stats[pair.tap]
            scale_I = self._smoother.scale(
                stacked_OI, stats, self._scheme, scale_dtype=self._stored_dtype, head_repeat=(pair.repeat, pair.head_dim)
            )
            folded_I = fold_(state.weights, pair, scale_I, stored_dtype=self._stored_dtype)
            for stat in stats.values():
                stat.rescale_(folded_I)


class RoundPass:
    """Rounds every group of linears, towards another target and refined if asked, and notes, per linear, the output error that is left of
    what was aimed at."""

    def __init__(
        self, rounder: Rounder, scheme: Scheme, stored_dtype: torch.dtype, refiner: Refiner | None = None, target: Target | None = None
    ) -> None:
        self._rounder, self._refiner, self._target, self._scheme, self._stored_dtype = rounder, refiner, target, scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        range_of_inputs: Mapping[str, StatFactory] = {"abs_max": AbsMax} if self._scheme.activation == "tensor" else {}
        optional = [each.stats() for each in (self._refiner, self._target) if each is not None]
        asked = {name: factory for stats in optional for name, factory in stats.items()}
        return {"second_moment": SecondMoment, **range_of_inputs, **self._rounder.stats(), **asked}

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            stats = state.stats[group.tap]
            weights = [state.weights[f"{linear}.weight"] for linear in group.linears]
            try:
                if self._target is not None:
                    weights = list(self._target.target(torch.cat(weights), stats).split([len(weight) for weight in weights]))
                rounded = self._rounded(torch.cat([whole_blocks(weight, self._scheme) for weight in weights]), stats)
                stacked = replace(rounded.weight, input_scale=self._input_scale(stats))
            except UsageError as error:
                raise UsageError(f"layer {state.layer_idx}, {', '.join(group.linears)}: {error}") from error
            pieces = _split_rows(stacked, [weight.shape[0] for weight in weights])
            for linear, weight, piece in zip(group.linears, weights, pieces, strict=True):
                state.quantized[linear] = piece
                state.row(linear).update(error_after=output_error(weight, piece.dequantize(), _moment(stats)), **rounded.facts)

    def _rounded(self, w_OI: Tensor, stats: Mapping[str, Stat]) -> Rounded:
        rounded = self._rounder.round(w_OI, stats, self._scheme, scale_dtype=self._stored_dtype)
        if self._refiner is None:
            return rounded
        refined = self._refiner.refine(w_OI, rounded.weight, stats)
        return Rounded(refined.weight, {**rounded.facts, **refined.facts})

    def _input_scale(self, stats: Mapping[str, Stat]) -> Tensor | None:
        """Raises UsageError: the inputs reached NaN or infinity."""
        if self._scheme.activation != "tensor":
            return None
        absmax = stats["abs_max"]
        assert isinstance(absmax, AbsMax)
        largest = absmax.max()
        if not bool(torch.isfinite(largest)):
            raise UsageError("the calibration data drives the inputs to NaN or infinity, so they have no range. Check the checkpoint.")
        return static_input_scale(largest, self._scheme, self._stored_dtype)


class BaselinePass:
    """Notes the output error of plain nearest rounding before anything is changed: what the methods are compared with."""

    def __init__(self, scheme: Scheme, stored_dtype: torch.dtype) -> None:
        self._scheme, self._stored_dtype = scheme, stored_dtype

    def stats(self) -> Mapping[str, StatFactory]:
        return {"second_moment": SecondMoment}

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            h_II = _moment(state.stats[group.tap])
            for linear in group.linears:
                weight = state.weights[f"{linear}.weight"]
                nearest = nearest_weight(weight, self._scheme, self._stored_dtype)
                state.row(linear).update(error_before=output_error(weight, nearest.dequantize(), h_II))


def _moment(stats: Mapping[str, Stat]) -> Tensor:
    moment = stats["second_moment"]
    assert isinstance(moment, SecondMoment)
    return moment.mean()


def _split_rows(weight: QuantizedWeight, rows: list[int]) -> list[QuantizedWeight]:
    scheme = weight.scheme
    scale_rows = [scheme.num_scale_rows(each) for each in rows]
    blocks = weight.codes_OI.split([each * scheme.block_rows for each in scale_rows])
    codes, scales = [block[:each] for block, each in zip(blocks, rows, strict=True)], weight.scale_OG.split(scale_rows)
    zeros = [None] * len(rows) if weight.zero_point_OG is None else list(weight.zero_point_OG.split(rows))
    return [QuantizedWeight(weight.scheme, *each, weight.input_scale) for each in zip(codes, scales, zeros, strict=True)]
