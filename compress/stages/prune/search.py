"""`target` of the prune stage: how much goes of heads, FFN and depth, by what each was measured to lose.

    measure    each axis alone, cut to a few levels by the recipe's own method on some calibration samples: KL to the source on others
    predict    the KL of a combination is the sum over axes of the piecewise-linear curve through what was measured
    choose     among all legal combinations that keep the target, the one of least predicted KL

The cost is parameters, or the time of one decode step: the kernels of each layer's linears and of the head, by this device or by a table
that ships, and the reading of a cache of `context` positions. Sums leave out that heads and channels of one layer make up for one another,
and that damage adds up faster than linearly; the report has the curve and what was measured, so that both can be looked at.

Each measurement lies in the scratch directory as soon as it is made.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.residual import kl_between, walk
from compress.digest import canonical_json, digest_json
from compress.errors import UsageError
from compress.kernels.coverage import PROJECTIONS, linear_shape
from compress.kernels.latency import latency_table
from compress.models.arch import Arch
from compress.models.pruning import HeadUnit, Widths, resized, with_layers
from compress.models.weights import WeightSource
from compress.runtime.linear_time import linear_time_us
from compress.runtime.loader import Target as Place
from compress.stages.prune.round import Round, forget, prune_round
from compress.stages.prune.spec import Axis, Target
from compress.stages.prune.widths import legal_channels, legal_heads, with_heads
from compress.validate.roofline import environment_facts, measure_bandwidth

LOSSES_NAME, TIMES_NAME = "losses.json", "times.json"
LEVELS = (0.875, 0.75, 0.5)
"""Shares kept at which an axis is measured; the last is also the least that stays of it."""
MAX_CHANNEL_CHOICES, MAX_FRONTIER_POINTS = 17, 60


@dataclass(frozen=True)
class Combination:
    """Widths with what they cost, as a share of the source, and the KL that is predicted of them."""

    widths: Widths
    cost: float
    kl: float


def depends(target: Target, device: str) -> dict[str, str]:
    """What decides the choice besides the recipe: whose times count."""
    if target.latency_frac is None:
        return {}
    if target.device is not None:
        return {"table": digest_json(sorted((*what, us) for what, us in latency_table(target.device).us.items()))}
    facts = environment_facts(torch.device(device))
    return {"machine": digest_json({name: facts.get(name) for name in ("device_key", "device", "threads", "driver")})}


def search(
    target: Target, how: Round, source: WeightSource, tokens_NS: Tensor, ctx: Context, *, multiple: int
) -> tuple[Widths, dict[str, Any]]:
    """The widths that keep the target at the least predicted KL, and the facts that explain them. All ranks come here together.

    Raises:
        UsageError: no combination keeps it, or there are too few samples to judge by.
    """
    arch = source.arch
    choices = {axis: _choices(axis, arch, target.unit, multiple) for axis in target.prune}
    if ctx.ranks.rank == 0:
        (ctx.scratch / "search").mkdir(parents=True, exist_ok=True)
    cost = ctx.ranks.broadcast(_costs(target, arch, choices, ctx) if ctx.ranks.rank == 0 else {})
    whole = cost[_key(Widths.of(arch))]
    allowed = {key: value / whole for key, value in cost.items() if value <= target.limit * whole}
    if not allowed:
        raise UsageError(
            f"the target {target.text} cannot be kept: with half of {', '.join(target.prune)} the model still costs "
            f"{min(cost.values()) / whole:.3f} of the source. Allow more, or let more go (`prune`)."
        )
    measured = _measured(target, how, source, tokens_NS, ctx, choices)
    combinations = [
        Combination(widths, cost[_key(widths)] / whole, _predicted(widths, arch, measured))
        for widths in _combined(arch, choices, target.unit)
    ]
    kept = [each for each in combinations if each.cost <= target.limit]
    best = min(kept, key=lambda each: (each.kl, each.cost))
    return best.widths, {
        "target": {
            "text": target.text,
            "cost": "parameters" if target.params_frac is not None else "time",
            "limit": target.limit,
            "chosen": _said(best),
            "measured": [
                {"axis": axis, "keep": keep, "kl": kl, "cost": _rounded(cost[_key(_alone(arch, axis, keep, target.unit))] / whole)}
                for axis, curve in measured.items()
                for keep, kl in curve.items()
            ],
            "frontier": [_said(each) for each in _frontier(combinations)],
        }
    }


def _choices(axis: Axis, arch: Arch, unit: HeadUnit, multiple: int) -> list[int]:
    """Legal numbers from half of all on, all of them last; of many channels an even choice."""
    if axis == "depth":
        legal = list(range(1, arch.num_layers + 1))
    else:
        legal = legal_heads(arch, unit, multiple) if axis == "heads" else legal_channels(arch, multiple)
    legal = [each for each in legal if each >= LEVELS[-1] * legal[-1]]
    if len(legal) <= MAX_CHANNEL_CHOICES or axis != "ffn":
        return legal
    step = (len(legal) - 1) / (MAX_CHANNEL_CHOICES - 1)
    return [legal[round(idx * step)] for idx in range(MAX_CHANNEL_CHOICES)]


def _alone(arch: Arch, axis: str, keep: int, unit: HeadUnit) -> Widths:
    widths = Widths.of(arch)
    if axis == "heads":
        return with_heads(arch, widths, keep, unit)
    return replace(widths, **{"intermediate_size" if axis == "ffn" else "num_layers": keep})


def _combined(arch: Arch, choices: Mapping[Axis, Sequence[int]], unit: HeadUnit) -> list[Widths]:
    combined = []
    for picks in itertools.product(*choices.values()):
        widths = Widths.of(arch)
        for axis, keep in zip(choices, picks, strict=True):
            alone = _alone(arch, axis, keep, unit)
            if axis == "heads":
                widths = replace(widths, num_heads=alone.num_heads, num_kv_heads=alone.num_kv_heads)
            else:
                widths = replace(widths, **{"intermediate_size" if axis == "ffn" else "num_layers": keep})
        combined.append(widths)
    return combined


def _key(widths: Widths) -> str:
    return ",".join(map(str, asdict(widths).values()))


def _shaped(arch: Arch, widths: Widths) -> Arch:
    return resized(with_layers(arch, range(widths.num_layers)), widths)


def _costs(target: Target, arch: Arch, choices: Mapping[Axis, Sequence[int]], ctx: Context) -> dict[str, float]:
    """Of every combination: parameters, or microseconds of a step."""
    combined = _combined(arch, choices, target.unit)
    if target.params_frac is not None:
        return {_key(each): float(_shaped(arch, each).num_params) for each in combined}
    linear_us, bytes_per_us = _timer(target, arch, ctx)
    return {_key(each): _step_us(_shaped(arch, each), target, linear_us, bytes_per_us) for each in combined}


def _step_us(arch: Arch, target: Target, linear_us: Callable[[Arch, str], float], bytes_per_us: float) -> float:
    """The linears of all layers, the head, and one reading of the keys and values."""
    shape = arch.layers[0]
    kv_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim * target.rows * target.context
    head_us = 2 * arch.vocab_size * arch.hidden_size / bytes_per_us
    return arch.num_layers * (sum(linear_us(arch, name) for name in PROJECTIONS) + kv_bytes / bytes_per_us) + head_us


def _timer(target: Target, arch: Arch, ctx: Context) -> tuple[Callable[[Arch, str], float], float]:
    """Microseconds of a projection of the first layer of a model, and bytes that are read in one."""
    dtype = getattr(torch, arch.dtype)
    if target.device is not None:
        table = latency_table(target.device)

        def by_table(shaped: Arch, name: str) -> float:
            n, k = linear_shape(shaped, name, layer_idx=0)
            return table.linear_us(name, n, k, None, rows=target.rows, dtype=dtype)[0]

        return by_table, table.bytes_per_us
    file, device = ctx.scratch / "search" / TIMES_NAME, torch.device(ctx.device)
    known: dict[str, float] = json.loads(file.read_bytes()) if file.exists() else {}
    place = Place(device, dtype if device.type == "cuda" else torch.float32, max_batch_size=target.rows, max_step_tokens=128)

    def kept(key: str, measure: Callable[[], float]) -> float:
        if key not in known:
            known[key] = round(measure(), 3)
            write_atomic(file, canonical_json(known))
        return known[key]

    def by_clock(shaped: Arch, name: str) -> float:
        n, k = linear_shape(shaped, name, layer_idx=0)
        return kept(f"{name},{n},{k}", lambda: linear_time_us(shaped, 0, name, None, rows=target.rows, target=place))

    return by_clock, kept("bytes_per_us", lambda: measure_bandwidth(device) / 1e6)


def _measured(
    target: Target, how: Round, source: WeightSource, tokens_NS: Tensor, ctx: Context, choices: Mapping[Axis, Sequence[int]]
) -> dict[Axis, dict[int, float]]:
    """Axis -> number kept -> KL of the source pruned along that axis alone, on samples that it was not pruned on."""
    judged = max(1, target.num_samples // 4)
    if len(tokens_NS) < 2 * judged + 1:
        raise UsageError(f"a target is searched on {target.num_samples + judged} calibration samples and there are {len(tokens_NS)}.")
    fitted_NS, judging_NS = tokens_NS[: min(target.num_samples, len(tokens_NS) - judged)], tokens_NS[-judged:]
    arch, leads, directory = source.arch, ctx.ranks.rank == 0, ctx.scratch / "search"
    dtype = compute_dtype(ctx.device, getattr(torch, arch.dtype))
    file = directory / LOSSES_NAME
    known: dict[str, float] = ctx.ranks.broadcast(json.loads(file.read_bytes()) if leads and file.exists() else {})
    of_source: list[Tensor] = []
    curves: dict[Axis, dict[int, float]] = {}
    for axis, legal in choices.items():
        curves[axis] = {legal[-1]: 0.0}
        for keep in sorted(
            {min(legal[:-1], key=lambda each: abs(each - level * legal[-1])) for level in LEVELS} if legal[:-1] else (), reverse=True
        ):
            key = f"{axis},{keep}"
            if key not in known:
                ctx.progress.say(f"target: the model with {axis} cut from {legal[-1]} to {keep}")
                pruned, _ = prune_round(how, source, _alone(arch, axis, keep, target.unit), fitted_NS, directory / key, ctx)
                if leads:
                    of_source = of_source or [walk(source, judging_NS, ctx, compute_dtype=dtype, what="the source")]
                    ended_NSD = walk(pruned, judging_NS, ctx, compute_dtype=dtype, what=f"{axis} {keep}")
                    known[key] = _rounded(kl_between(source, of_source[0], ended_NSD, torch.device(ctx.device)))
                    write_atomic(file, canonical_json(known))
                    forget(directory / key)
                known[key] = ctx.ranks.broadcast(known.get(key, 0.0))
            curves[axis][keep] = known[key]
    return curves


def _predicted(widths: Widths, arch: Arch, measured: Mapping[Axis, Mapping[int, float]]) -> float:
    kept: dict[Axis, int] = {"heads": widths.num_heads, "ffn": widths.intermediate_size, "depth": widths.num_layers}
    return sum(_interpolated(kept[axis], curve) for axis, curve in measured.items())


def _interpolated(keep: int, curve: Mapping[int, float]) -> float:
    """On the line through what was measured; a level that lost less than one that keeps more counts as much."""
    points, worst = [], 0.0
    for each in sorted(curve, reverse=True):
        worst = max(worst, curve[each])
        points.append((each, worst))
    for (more, less_kl), (fewer, more_kl) in itertools.pairwise(points):
        if fewer <= keep <= more:
            return less_kl + (more_kl - less_kl) * (more - keep) / (more - fewer)
    return points[0][1] if keep >= points[0][0] else points[-1][1] * (points[0][0] - keep) / max(points[0][0] - points[-1][0], 1)


def _frontier(combinations: Sequence[Combination]) -> list[Combination]:
    """By rising cost, each of less KL than all that cost less."""
    best: list[Combination] = []
    for each in sorted(combinations, key=lambda each: (each.cost, each.kl)):
        if not best or each.kl < best[-1].kl:
            best.append(each)
    if len(best) > MAX_FRONTIER_POINTS:
        step = (len(best) - 1) / (MAX_FRONTIER_POINTS - 1)
        best = [best[round(idx * step)] for idx in range(MAX_FRONTIER_POINTS)]
    return best


def _said(each: Combination) -> dict[str, float]:
    widths = each.widths
    named = {"heads": widths.num_heads, "kv_heads": widths.num_kv_heads, "ffn": widths.intermediate_size, "layers": widths.num_layers}
    return {**named, "cost": _rounded(each.cost), "kl": _rounded(each.kl)}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
