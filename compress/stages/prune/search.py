"""The search for `target`: how much of heads, FFN and depth goes, by the loss measured along each.

    measure    prune each axis alone to a few levels by the recipe's own method, on some calibration samples;
               KL to the source on others
    predict    the KL of a combination is the sum over axes of the piecewise-linear curve through the
               measurements
    choose     among all legal combinations within the budget, the one of least predicted KL

Costs are those of `costs.py`. The sums ignore that heads and channels of one layer compensate for one
another, and that damage adds up faster than linearly; the report shows the curve and the measurements, so
that both can be examined.

Each measurement is written to the scratch directory as soon as it is made.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.residual import kl_between, walk
from compress.context import Context
from compress.digest import significant
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.pruning import HeadUnit, Widths
from compress.models.weights import WeightSource
from compress.stages.budget.allocation import thinned
from compress.stages.prune.costs import SEARCH_NAME, costs_of
from compress.stages.prune.round import PruningMethod, delete_weights, prune_round
from compress.stages.prune.spec import Axis, PruningBudget
from compress.stages.prune.widths import legal_channels, legal_heads, with_heads

LOSSES_NAME = "losses.json"
LEVELS = (0.875, 0.75, 0.5)
"""Shares kept at which an axis is measured; the last is also the least that stays of an axis."""
MAX_CHANNEL_CHOICES = 17
MAX_FRONTIER_POINTS = 60


@dataclass(frozen=True)
class Combination:
    """Widths with their cost, as a share of the source's, and their predicted KL."""

    widths: Widths
    cost: float
    kl: float


def search(
    budget: PruningBudget,
    method: PruningMethod,
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    *,
    multiple: int,
) -> tuple[Widths, dict[str, Any]]:
    """Return the widths within the budget of least predicted KL, and the facts that explain them; all ranks
    take part.

    Raises:
        UsageError: no combination is within the budget, or there are too few samples to measure on.
    """
    arch = source.arch
    choices = {axis: _choices(axis, arch, budget.unit, multiple) for axis in budget.prune}
    if ctx.ranks.rank == 0:
        (ctx.scratch / SEARCH_NAME).mkdir(parents=True, exist_ok=True)
    combined = _combined(arch, choices, budget.unit)
    costs = ctx.ranks.from_lead(lambda: costs_of(combined, budget, arch, ctx))
    cost = dict(zip(combined, costs, strict=True))
    whole = cost[Widths.of(arch)]
    if min(costs) > budget.limit * whole:
        raise UsageError(
            f"the target {budget.text} cannot be kept: with half of {', '.join(budget.prune)} the model "
            "still costs "
            f"{min(costs) / whole:.3f} of the source. Allow more, or let more go (`prune`)."
        )
    measured = _measured(budget, method, source, tokens_NS, ctx, choices)
    combinations = [Combination(each, cost[each] / whole, _predicted(each, measured)) for each in combined]
    kept = [each for each in combinations if each.cost <= budget.limit]
    best = min(kept, key=lambda each: (each.kl, each.cost))
    return best.widths, {
        "target": {
            "text": budget.text,
            "cost": "parameters" if budget.params_frac is not None else "time",
            "limit": budget.limit,
            "chosen": _row(best),
            "measured": [
                {
                    "axis": axis,
                    "keep": keep,
                    "kl": kl,
                    "cost": significant(cost[_alone(arch, axis, keep, budget.unit)] / whole),
                }
                for axis, curve in measured.items()
                for keep, kl in curve.items()
            ],
            "frontier": [_row(each) for each in _frontier(combinations)],
        }
    }


def _choices(axis: Axis, arch: Arch, unit: HeadUnit, multiple: int) -> list[int]:
    """Return legal numbers from half of all on, all of them last; of many FFN channels an even choice."""
    if axis == "depth":
        legal = list(range(1, arch.num_layers + 1))
    else:
        legal = legal_heads(arch, unit, multiple) if axis == "heads" else legal_channels(arch, multiple)
    legal = [each for each in legal if each >= LEVELS[-1] * legal[-1]]
    return thinned(legal, MAX_CHANNEL_CHOICES) if axis == "ffn" else legal


def _cut(arch: Arch, widths: Widths, axis: Axis, keep: int, unit: HeadUnit) -> Widths:
    if axis == "heads":
        return with_heads(arch, widths, keep, unit)
    return replace(widths, **{"intermediate_size" if axis == "ffn" else "num_layers": keep})


def _alone(arch: Arch, axis: Axis, keep: int, unit: HeadUnit) -> Widths:
    return _cut(arch, Widths.of(arch), axis, keep, unit)


def _combined(arch: Arch, choices: Mapping[Axis, Sequence[int]], unit: HeadUnit) -> list[Widths]:
    combined = [Widths.of(arch)]
    for axis, legal in choices.items():
        combined = [_cut(arch, widths, axis, keep, unit) for widths in combined for keep in legal]
    return combined


def _measured(
    budget: PruningBudget,
    method: PruningMethod,
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    choices: Mapping[Axis, Sequence[int]],
) -> dict[Axis, dict[int, float]]:
    """Return axis -> number kept -> KL of the source pruned along that axis alone, measured on samples
    that it was not pruned on."""
    judged = max(1, budget.num_samples // 4)
    if len(tokens_NS) < 2 * judged + 1:
        raise UsageError(
            f"a target is searched on {budget.num_samples + judged} calibration samples and there are "
            f"{len(tokens_NS)}."
        )
    fitted_NS = tokens_NS[: min(budget.num_samples, len(tokens_NS) - judged)]
    judging_NS = tokens_NS[-judged:]
    arch = source.arch
    leads = ctx.ranks.rank == 0
    directory = ctx.scratch / SEARCH_NAME
    dtype = compute_dtype(ctx.device, getattr(torch, arch.dtype))
    point = ResumePoint(directory / LOSSES_NAME, ctx.progress.log)
    known: dict[str, float] = ctx.ranks.from_lead(lambda: point.load() or {})
    source_hidden: list[Tensor] = []
    curves: dict[Axis, dict[int, float]] = {}
    for axis, legal in choices.items():
        curves[axis] = {legal[-1]: 0.0}
        levels = (
            {min(legal[:-1], key=lambda each: abs(each - level * legal[-1])) for level in LEVELS}
            if legal[:-1]
            else set[int]()
        )
        for keep in sorted(levels, reverse=True):
            key = f"{axis},{keep}"
            if key not in known:
                ctx.progress.log(f"target: the model with {axis} cut from {legal[-1]} to {keep}")
                pruned, _ = prune_round(
                    method, source, _alone(arch, axis, keep, budget.unit), fitted_NS, directory / key, ctx
                )
                if leads:
                    source_hidden = source_hidden or [
                        walk(source, judging_NS, ctx, compute_dtype=dtype, task="the source")
                    ]
                    ended_NSD = walk(pruned, judging_NS, ctx, compute_dtype=dtype, task=f"{axis} {keep}")
                    known[key] = significant(
                        kl_between(source, source_hidden[0], ended_NSD, torch.device(ctx.device))
                    )
                    point.save(known)
                    delete_weights(directory / key)
                known[key] = ctx.ranks.broadcast(known.get(key, 0.0))
            curves[axis][keep] = known[key]
    return curves


def _predicted(widths: Widths, measured: Mapping[Axis, Mapping[int, float]]) -> float:
    kept: dict[Axis, int] = {
        "heads": widths.num_heads,
        "ffn": widths.intermediate_size,
        "depth": widths.num_layers,
    }
    return sum(_interpolated(kept[axis], curve) for axis, curve in measured.items())


def _interpolated(keep: int, curve: Mapping[int, float]) -> float:
    """Return the KL on the line through the measurements; a level that lost less than one that keeps more
    counts as much as that one."""
    points = []
    worst = 0.0
    for each in sorted(curve, reverse=True):
        worst = max(worst, curve[each])
        points.append((each, worst))
    for (more, less_kl), (fewer, more_kl) in itertools.pairwise(points):
        if fewer <= keep <= more:
            return less_kl + (more_kl - less_kl) * (more - keep) / (more - fewer)
    return worst


def _frontier(combinations: Sequence[Combination]) -> list[Combination]:
    """Return combinations by rising cost, each of less KL than all that cost less."""
    best: list[Combination] = []
    for each in sorted(combinations, key=lambda each: (each.cost, each.kl)):
        if not best or each.kl < best[-1].kl:
            best.append(each)
    return thinned(best, MAX_FRONTIER_POINTS)


def _row(each: Combination) -> dict[str, float]:
    widths = each.widths
    named = {
        "heads": widths.num_heads,
        "kv_heads": widths.num_kv_heads,
        "ffn": widths.intermediate_size,
        "layers": widths.num_layers,
    }
    return {**named, "cost": significant(each.cost), "kl": significant(each.kl)}
