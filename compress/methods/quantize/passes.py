"""The passes of the sequential runner that quantize a layer: report plain rounding, smooth, round.

A smoother's scale is folded into the producer and the statistics are rescaled with it (H' = H / (s s^T)), so
the rounder needs no second observation. The linears of a group are rounded as one matrix, stacked along O,
and share the scales and the zero point of a static input; no block of rows with one scale extends over two
linears. Linears without a scheme are left out, and so is a smoother that has no effect on the linears'
scheme.

Shapes: O out, I in.
"""

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.input_range import range_stats, static_input
from compress.calibrate.layer_state import LayerState
from compress.calibrate.memory_guard import rounds_as_one
from compress.calibrate.side_by_side import num_at_once, side_by_side
from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.methods.quantize import Refiner, Rounder, RoundingTarget, Smoother
from compress.models.linear_groups import LinearGroup
from compress.models.smoothing_pair import SmoothingPair
from compress.models.surgery import fold_, producer_scale
from compress.models.weights import dense
from compress.quant.global_scale import with_one_global_scale
from compress.quant.numerics import nearest_weight, output_error, whole_blocks
from compress.quant.scheme import QuantizedWeight, Scheme, Schemes

CPU_PIECE = (1 << 15) - 1
"""Largest number of weights that a core rounds at once: intermediate results stay in its cache, and torch
does not divide an operation of so few numbers among threads, which wait for one another on a busy machine:
rounding the bundled model took 2 to 20 s on two busy cores, and in such pieces 0.7 s."""


@dataclass(frozen=True)
class _Stack:
    """Linears over one input that are rounded as one matrix [O, I], stacked along O."""

    linears: tuple[str, ...]
    shape: tuple[int, int]
    stats: InputStats
    scheme: Scheme


class SmoothPass:
    """A `LayerPass` that finds and folds the smoother's scale for every smoothing pair, and rescales the
    statistics."""

    def __init__(self, smoother: Smoother, schemes: Schemes, stored_dtype: torch.dtype) -> None:
        self._smoother = smoother
        self._schemes = schemes
        self._stored_dtype = stored_dtype

    def needs(self) -> tuple[type[Stat], ...]:
        return self._smoother.needs()

    def apply(self, state: LayerState) -> None:
        """Find each scale on the rank that holds the statistics of its inputs, and fold all of them on every
        rank.

        No fold changes columns that another pair reads, so all scales are found before the first is folded.
        """
        scales = dict[str, Tensor]()
        for pair in state.pairs:
            scheme = state.scheme(self._schemes, pair.linears)
            if scheme is not None and not self._smoother.no_effect_on(scheme) and pair.tap in state.stats:
                scales[pair.tap] = state.run.memory.retry_on_oom(
                    partial(self._scale, pair, state, scheme), f"smoothing {pair.tap}"
                )
        for found in state.run.ranks.all_gather(scales):
            scales |= found
        for pair in state.pairs:
            if pair.tap not in scales:
                continue
            folded_I = fold_(state.weights, pair, scales[pair.tap], stored_dtype=self._stored_dtype)
            for stat in state.stats.get(pair.tap, ()):
                stat.rescale_(folded_I)
            state.rescale_outputs(pair.producer, producer_scale(folded_I, pair))

    def _scale(self, pair: SmoothingPair, state: LayerState, scheme: Scheme) -> Tensor:
        """Return the scale [I] of one smoothing pair."""
        return self._smoother.scale(
            _stacked(pair.linears, state),
            state.stats[pair.tap],
            scheme,
            scale_dtype=self._stored_dtype,
            head_repeat=(pair.repeat, pair.head_dim),
        )


class RoundPass:
    """A `LayerPass` that rounds every linear group, and reports each linear's remaining output error.

    The error is relative to the rounding target where there is one, and to the linear's own weights
    otherwise.
    """

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
        methods = (self._rounder, self._refiner, self._target)
        return (
            SecondMoment,
            *range_stats(self._schemes.all),
            *(kind for method in methods if method is not None for kind in method.needs()),
        )

    def apply(self, state: LayerState) -> None:
        """Replace the weights of every group that has a scheme by quantized ones.

        Raises:
            UsageError: the statistics hold NaN or infinity.
        """
        stacks = [stack for group in state.groups for stack in self._stacks(group, state)]
        at_once = min((num_at_once(*each.shape) for each in stacks), default=1)
        solve = partial(self._round_named, state)
        for stack in side_by_side(solve, stacks, state.run.device, at_once):
            smaller = [replace(stack, linears=(each,)) for each in stack.linears]
            state.run.memory.retry_on_oom(
                partial(solve, stack),
                f"rounding {', '.join(stack.linears)}",
                smaller=partial(self._one_by_one, smaller, state)
                if len(smaller) > 1 and not self._rounder.one_scale
                else None,
            )

    def _stacks(self, group: LinearGroup, state: LayerState) -> list[_Stack]:
        """Return what is rounded of a group as one matrix each; nothing of a group that stays dense."""
        scheme = state.scheme(self._schemes, group.linears)
        if scheme is None:
            return []
        loaded = state.loaded_weights()
        weights = [dense(loaded[f"{linear}.weight"]) for linear in group.linears]
        rows = [len(weight) for weight in weights]
        columns = weights[0].shape[1]
        as_one = self._rounder.one_scale or rounds_as_one(sum(rows) * columns, on_cpu=not weights[0].is_cuda)
        sets = [group.linears] if as_one else [(linear,) for linear in group.linears]
        sizes = [sum(rows)] if as_one else rows
        stats = state.stats[group.tap]
        return [
            _Stack(linears, (size, columns), stats, scheme) for linears, size in zip(sets, sizes, strict=True)
        ]

    def _one_by_one(self, stacks: list[_Stack], state: LayerState) -> None:
        """Round stacks of one linear in turn, which needs less memory."""
        for stack in stacks:
            state.run.memory.retry_on_oom(
                partial(self._round_named, state, stack), f"rounding {stack.linears[0]}"
            )

    def _round_named(self, state: LayerState, stack: _Stack) -> None:
        """Round a stack of linears, and name them in the error of bad statistics."""
        try:
            self._round(stack.linears, stack.stats, state, stack.scheme)
        except UsageError as error:
            raise UsageError(f"layer {state.layer_idx}, {', '.join(stack.linears)}: {error}") from error

    def _round(self, linears: tuple[str, ...], stats: InputStats, state: LayerState, scheme: Scheme) -> None:
        """Round some linears as one matrix.

        The float32 copies of the weights are made each time they are read instead of held, to save memory; a
        rounding target is too expensive to compute twice.
        """
        target_OI = None if self._target is None else self._target.target(_stacked(linears, state), stats)
        rows = [state.weights[f"{linear}.weight"].shape[0] for linear in linears]

        def targets() -> list[Tensor]:
            return list((_stacked(linears, state) if target_OI is None else target_OI).split(rows))

        rounded = self._rounder.round(
            _stacked_blocks(targets(), scheme), stats, scheme, scale_dtype=self._stored_dtype
        )
        refined = rounded
        if self._refiner is not None:
            refined = self._refiner.refine(
                _stacked_blocks(targets(), scheme), rounded.weight, stats, state.output_moment(linears)
            )
        (whole,) = with_one_global_scale([refined.weight])
        found = static_input(stats, scheme, self._stored_dtype)
        with_input = replace(
            whole,
            input_scale=found.scale,
            input_zero_point=found.zero_point,
            input_global_scale=found.global_scale,
        )
        weights = _split_rows(with_input, rows)
        unrefined = _split_rows(rounded.weight, rows)
        h_II = stats[SecondMoment].mean()
        for linear, w_OI, weight, before in zip(linears, targets(), weights, unrefined, strict=True):
            row = state.row(linear)
            row.update(error_after=output_error(w_OI, weight.dequantize(), h_II))
            row.update({**rounded.facts, **refined.facts})
            if self._refiner is not None:
                row.update(codes_moved=_changed_frac(before.codes_OI, weight.codes_OI))
        for linear, weight in zip(linears, weights, strict=True):
            state.quantize(linear, weight)


class DataFreePass:
    """A `LayerPass` that rounds every linear with a rounder that reads no statistic; reports nothing.

    A CPU rounds a few rows at a time on each core. Rows are independent, so the codes are those of
    `RoundPass`.
    """

    def __init__(self, rounder: Rounder, schemes: Schemes, stored_dtype: torch.dtype) -> None:
        self._rounder = rounder
        self._schemes = schemes
        self._stored_dtype = stored_dtype

    def needs(self) -> tuple[type[Stat], ...]:
        return self._rounder.needs()

    def apply(self, state: LayerState) -> None:
        """Replace the weights of every linear that has a scheme by a quantized one."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for linear in state.num_rows:
                scheme = state.scheme(self._schemes, (linear,))
                if scheme is not None:
                    w_OI = dense(state.loaded_weights()[f"{linear}.weight"])
                    rounded = state.run.memory.retry_on_oom(
                        partial(self._round, w_OI, scheme, pool), f"rounding {linear}"
                    )
                    state.quantize(linear, rounded)

    def _round(self, w_OI: Tensor, scheme: Scheme, pool: Executor) -> QuantizedWeight:
        if w_OI.is_cuda:
            return self._round_rows(w_OI, scheme)
        rows = max(1, CPU_PIECE // (w_OI.shape[1] * scheme.block_rows)) * scheme.block_rows
        pieces = w_OI.split(rows)
        return _joined(list(pool.map(partial(self._round_rows, scheme=scheme), pieces)))

    def _round_rows(self, w_OI: Tensor, scheme: Scheme) -> QuantizedWeight:
        """Return the codes of whole blocks of rows, and of the rest of the rows in the last one."""
        padded_OI = whole_blocks(w_OI.to(torch.float32), scheme)
        rounded = self._rounder.round(padded_OI, InputStats(), scheme, scale_dtype=self._stored_dtype)
        return _split_rows(rounded.weight, [len(w_OI)])[0]


class BaselinePass:
    """A `LayerPass` that reports the output error of plain nearest rounding, to compare the methods with;
    changes no weight."""

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
                    partial(self._report, linear, state.stats[group.tap], state, scheme), f"rounding {linear}"
                )

    def _report(self, linear: str, stats: InputStats, state: LayerState, scheme: Scheme) -> None:
        """Set `error_before` in the linear's row of the report."""
        weight = state.weights[f"{linear}.weight"]
        nearest = nearest_weight(weight, scheme, self._stored_dtype)
        state.row(linear).update(
            error_before=output_error(weight, nearest.dequantize(), stats[SecondMoment].mean())
        )


def _stacked_blocks(weights: list[Tensor], scheme: Scheme) -> Tensor:
    """Return the weights stacked along O, each padded so that no block of rows extends over two of them."""
    padded = [whole_blocks(weight, scheme) for weight in weights]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def _stacked(linears: tuple[str, ...], state: LayerState) -> Tensor:
    """Return the float32 weights of the linears, stacked along O."""
    weights = [state.weights[f"{linear}.weight"] for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _changed_frac(before_OI: Tensor, after_OI: Tensor) -> float:
    """Return the share of codes that differ, compared as bytes."""
    changed = int((before_OI.view(torch.int8) != after_OI.view(torch.int8)).sum())
    return round(changed / before_OI.numel(), 4)


def _joined(pieces: list[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight from consecutive rows of it; inverse of `_split_rows`."""
    zeros = [piece.zero_point_OG for piece in pieces if piece.zero_point_OG is not None]
    return QuantizedWeight(
        pieces[0].scheme,
        torch.cat([piece.codes_OI for piece in pieces]),
        torch.cat([piece.scale_OG for piece in pieces]),
        torch.cat(zeros) if zeros else None,
    )


def _split_rows(weight: QuantizedWeight, rows: list[int]) -> list[QuantizedWeight]:
    """Return the weights of the stacked linears, which have so many rows each, without the padding between
    them."""
    scheme = weight.scheme
    scale_rows = [scheme.num_scale_rows(num_rows) for num_rows in rows]
    padded = weight.codes_OI.split([num_scale_rows * scheme.block_rows for num_scale_rows in scale_rows])
    codes = [codes_OI[:num_rows] for codes_OI, num_rows in zip(padded, rows, strict=True)]
    scales = weight.scale_OG.split(scale_rows)
    zeros = [None] * len(rows) if weight.zero_point_OG is None else list(weight.zero_point_OG.split(rows))
    return [
        replace(weight, codes_OI=codes_OI, scale_OG=scale_OG, zero_point_OG=zero_OG)
        for codes_OI, scale_OG, zero_OG in zip(codes, scales, zeros, strict=True)
    ]
