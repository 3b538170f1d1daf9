"""How smoothers and rounders meet a layer: passes over `LayerState`, each a step of the sequential runner.

A smoother's scale is folded into the producer and the statistics move along with it (H' = H / (s s^T)), so the rounder behind it needs no
second observation. Linears that share an input are rounded as one matrix, stacked along O, and share the scale of a static input; no
block of rows that has one scale reaches from a linear into the next. Linears without a scheme are passed over, and so is a smoother
where it does nothing for the scheme behind it.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.layer_state import LayerState
from compress.calibrate.memory_guard import rounds_as_one
from compress.calibrate.stats import AbsMax, InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.quantize import Refiner, Rounder, RoundingTarget, Smoother
from compress.models.arch import LinearGroup
from compress.models.decoder import SmoothingPair
from compress.models.surgery import fold_, producer_scale
from compress.quant.numerics import nearest_weight, output_error, static_input_scale, whole_blocks
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes


class SmoothPass:
    """Finds and folds the smoother's scale for every pair of a layer, and moves the statistics along."""

    def __init__(self, smoother: Smoother, schemes: Schemes, stored_dtype: torch.dtype) -> None:
        self._smoother = smoother
        self._schemes = schemes
        self._stored_dtype = stored_dtype

    def needs(self) -> tuple[type[Stat], ...]:
        return self._smoother.needs()

    def apply(self, state: LayerState) -> None:
        """Each scale is found where the statistics of its inputs are, and folded on every rank. No fold touches the columns that a later
        pair looks at, so all scales may be found before the first is folded."""
        scales = dict[str, Tensor]()
        for pair in state.pairs:
            scheme = state.scheme(self._schemes, pair.linears)
            if scheme is not None and not self._smoother.idle(scheme) and pair.tap in state.stats:
                scales[pair.tap] = state.run.memory.retry_on_oom(
                    partial(self._scale, pair, state, scheme), f"smoothing {pair.tap}"
                )
        for rank in range(state.run.ranks.size):
            scales |= state.run.ranks.broadcast(scales, source=rank)
        for pair in state.pairs:
            if pair.tap not in scales:
                continue
            folded_I = fold_(state.weights, pair, scales[pair.tap], stored_dtype=self._stored_dtype)
            for stat in state.stats.get(pair.tap, ()):
                stat.rescale_(folded_I)
            state.rescale_outputs(pair.producer, producer_scale(folded_I, pair))

    def _scale(self, pair: SmoothingPair, state: LayerState, scheme: Scheme) -> Tensor:
        head_repeat = (pair.repeat, pair.head_dim)
        return self._smoother.scale(
            _stacked(pair.linears, state),
            state.stats[pair.tap],
            scheme,
            scale_dtype=self._stored_dtype,
            head_repeat=head_repeat,
        )


class RoundPass:
    """Rounds every group of linears, towards another target and refined if asked, and notes, per linear, the output error that is left of
    what was aimed at."""

    def __init__(
        self,
        rounder: Rounder,
        schemes: Schemes,
        stored_dtype: torch.dtype,
        refiner: Refiner | None = None,
        target: RoundingTarget | None = None,
    ) -> None:
        self._rounder = rounder
        self._refiner = refiner
        self._target = target
        self._schemes = schemes
        self._stored_dtype = stored_dtype

    def needs(self) -> tuple[type[Stat], ...]:
        has_static_inputs = any(scheme.activation == "tensor" for scheme in self._schemes.all)
        methods = (self._rounder, self._refiner, self._target)
        return (
            SecondMoment,
            *((AbsMax,) if has_static_inputs else ()),
            *(kind for method in methods if method is not None for kind in method.needs()),
        )

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            scheme = state.scheme(self._schemes, group.linears)
            if scheme is None:
                continue
            stats = state.stats[group.tap]
            try:
                for linears in self._stacks(group, state):
                    whole = partial(self._round, linears, stats, state, scheme)
                    alone = (
                        partial(self._one_by_one, linears, stats, state, scheme) if len(linears) > 1 else None
                    )
                    state.run.memory.retry_on_oom(whole, f"rounding {', '.join(linears)}", smaller=alone)
            except UsageError as error:
                raise UsageError(f"layer {state.layer_idx}, {', '.join(group.linears)}: {error}") from error

    def _stacks(self, group: LinearGroup, state: LayerState) -> list[tuple[str, ...]]:
        """The linears that are rounded as one matrix."""
        weights = [state.weights[f"{linear}.weight"] for linear in group.linears]
        as_one = rounds_as_one(sum(weight.numel() for weight in weights), on_cpu=not weights[0].is_cuda)
        return [group.linears] if as_one else [(linear,) for linear in group.linears]

    def _one_by_one(
        self, linears: tuple[str, ...], stats: InputStats, state: LayerState, scheme: Scheme
    ) -> None:
        for linear in linears:
            state.run.memory.retry_on_oom(
                partial(self._round, (linear,), stats, state, scheme), f"rounding {linear}"
            )

    def _round(self, linears: tuple[str, ...], stats: InputStats, state: LayerState, scheme: Scheme) -> None:
        """Float32 copies of the weights are made where they are read, and not held between; those of a target cost too much for that."""
        target_OI = None if self._target is None else self._target.target(_stacked(linears, state), stats)
        rows = [state.weights[f"{linear}.weight"].shape[0] for linear in linears]

        def aimed_at() -> list[Tensor]:
            return list((_stacked(linears, state) if target_OI is None else target_OI).split(rows))

        rounded = self._rounder.round(
            _in_blocks(aimed_at(), scheme), stats, scheme, scale_dtype=self._stored_dtype
        )
        final = (
            rounded
            if self._refiner is None
            else self._refiner.refine(
                _in_blocks(aimed_at(), scheme), rounded.weight, stats, state.output_moment(linears)
            )
        )
        pieces = _split_rows(replace(final.weight, input_scale=self._input_scale(stats, scheme)), rows)
        before = _split_rows(rounded.weight, rows)
        h_II = stats[SecondMoment].mean()
        for linear, weight, piece, first in zip(linears, aimed_at(), pieces, before, strict=True):
            error = output_error(weight, piece.dequantize(), h_II)
            moved = (
                {}
                if self._refiner is None
                else {"codes_moved": _share_changed(first.codes_OI, piece.codes_OI)}
            )
            state.row(linear).update(error_after=error, **{**rounded.facts, **final.facts}, **moved)
        for linear, piece in zip(linears, pieces, strict=True):
            state.quantize(linear, piece)

    def _input_scale(self, stats: InputStats, scheme: Scheme) -> Tensor | None:
        """Raises UsageError: the inputs reached NaN or infinity."""
        if scheme.activation != "tensor":
            return None
        largest = stats[AbsMax].max()
        if not bool(torch.isfinite(largest)):
            raise UsageError(
                "the calibration data drives the inputs to NaN or infinity, so they have no range. Check the checkpoint."
            )
        return static_input_scale(largest, scheme, self._stored_dtype)


class BaselinePass:
    """Notes the output error of plain nearest rounding before anything is changed: what the methods are compared with."""

    def __init__(self, schemes: Schemes, stored_dtype: torch.dtype) -> None:
        self._schemes = schemes
        self._stored_dtype = stored_dtype

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def apply(self, state: LayerState) -> None:
        for group in state.groups:
            scheme = state.scheme(self._schemes, group.linears)
            if scheme is None:
                continue
            for linear in group.linears:
                state.run.memory.retry_on_oom(
                    partial(self._note, linear, state.stats[group.tap], state, scheme), f"rounding {linear}"
                )

    def _note(self, linear: str, stats: InputStats, state: LayerState, scheme: Scheme) -> None:
        weight = state.weights[f"{linear}.weight"]
        nearest = nearest_weight(weight, scheme, self._stored_dtype)
        state.row(linear).update(
            error_before=output_error(weight, nearest.dequantize(), stats[SecondMoment].mean())
        )


def _in_blocks(weights: list[Tensor], scheme: Scheme) -> Tensor:
    """One matrix, in which no block of rows reaches from one weight into the next."""
    filled = [whole_blocks(weight, scheme) for weight in weights]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _stacked(linears: tuple[str, ...], state: LayerState) -> Tensor:
    weights = [state.weights[f"{linear}.weight"] for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _share_changed(before_OI: Tensor, after_OI: Tensor) -> float:
    """Of codes, compared as bytes."""
    changed = int((before_OI.view(torch.int8) != after_OI.view(torch.int8)).sum())
    return round(changed / before_OI.numel(), 4)


def _split_rows(weight: QuantizedWeight, rows: list[int]) -> list[QuantizedWeight]:
    scheme = weight.scheme
    scale_rows = [scheme.num_scale_rows(each) for each in rows]
    blocks = weight.codes_OI.split([each * scheme.block_rows for each in scale_rows])
    codes = [block[:each] for block, each in zip(blocks, rows, strict=True)]
    scales = weight.scale_OG.split(scale_rows)
    zeros = [None] * len(rows) if weight.zero_point_OG is None else list(weight.zero_point_OG.split(rows))
    return [
        QuantizedWeight(weight.scheme, *each, weight.input_scale)
        for each in zip(codes, scales, zeros, strict=True)
    ]
