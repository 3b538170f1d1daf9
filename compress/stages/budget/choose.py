"""Mixed precision: which scheme each linear group gets, by what it costs in accuracy and in bytes or time.

Sensitivities come from one backward pass over part of the calibration set (`sensitivity.py`), costs from
`costs.py`; `allocation.py` picks the schemes. The result has the same form as per-layer overrides.

Every measurement is written to the scratch directory before anything is decided by it, so that a resumed run
decides the same.
"""

from collections.abc import Sequence
from typing import Any

import torch

from compress.artifact.resume import ResumePoint
from compress.calibrate.gradients import visit_gradients
from compress.context import Context
from compress.data.tokens import TokenSet
from compress.digest import significant
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.weights import WeightSource
from compress.quant.model_scheme import ModelScheme, commonest
from compress.quant.scheme import DENSE, name_of
from compress.stages.budget.allocation import (
    Allocation,
    Option,
    allocate,
    allocation,
    frontier,
    thinned,
)
from compress.stages.budget.costs import TICKS_PER_US, Costs, GroupSchemes, costs_of
from compress.stages.budget.sensitivity import Sensitivities
from compress.stages.budget.spec import Mixed
from compress.stages.budget.times import TIMES_NAME, times_on

SENSITIVITIES_NAME = "sensitivities.json"
MAX_FRONTIER_POINTS = 100


def choose(
    spec: Mixed,
    groups: Sequence[GroupSchemes],
    source: WeightSource,
    tokens: TokenSet,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    outer_bytes: int,
) -> tuple[ModelScheme, dict[str, Any]]:
    """Return the chosen schemes, without the head's, and the facts that explain them.

    Raises:
        UsageError: no choice keeps the budget, or every linear may stay dense.
    """
    budget = spec.budget
    times = times_on(budget.device, budget.rows, ctx.scratch / TIMES_NAME, ctx) if budget.is_time else None
    costs = costs_of(budget, groups, source.arch, outer_bytes=outer_bytes, times=times)
    losses = _sensitivities(spec, groups, source, tokens, ctx, compute_dtype)
    options = [
        [Option(name, loss[name], cost) for name, cost in of_group.items()]
        for loss, of_group in zip(losses, costs.by_group, strict=True)
    ]
    best = allocate(options, costs.limit)
    chosen = {
        linear: each.schemes[pick]
        for each, pick in zip(groups, best.picks, strict=True)
        for linear in each.linears
    }
    if not any(chosen.values()):
        raise UsageError(
            f"the budget {budget.text} leaves every linear dense: there is nothing to quantize. Leave out "
            "the stage instead."
        )
    return commonest(chosen), _facts(spec, groups, options, best, costs, source.arch)


def _sensitivities(
    spec: Mixed,
    groups: Sequence[GroupSchemes],
    source: WeightSource,
    tokens: TokenSet,
    ctx: Context,
    compute_dtype: torch.dtype,
) -> list[dict[str, float]]:
    """Return scheme -> predicted KL of each group for a token that counts, measured once and kept in the
    scratch directory."""
    point = ResumePoint(ctx.scratch / SENSITIVITIES_NAME, ctx.progress.log)
    rows = point.load()
    if rows is None:
        schemes = list(
            dict.fromkeys(scheme for each in groups for scheme in each.schemes if scheme is not None)
        )
        visitor = Sensitivities(schemes, getattr(torch, source.arch.dtype))
        sampled_NS = tokens.tokens_NS[: spec.num_samples]
        counted_NS = None if tokens.counted_NS is None else tokens.counted_NS[: spec.num_samples]
        draws_NS = torch.rand(sampled_NS.shape, generator=ctx.rng("sensitivities", "labels"))
        visit_gradients(
            source,
            sampled_NS,
            visitor,
            ctx,
            compute_dtype=compute_dtype,
            draws_NS=draws_NS,
            counted_NS=counted_NS,
        )
        rows = [[*key, losses] for key, losses in visitor.loss.items()]
        if counted_NS is not None:  # the visitor divides by all tokens
            factor = counted_NS.numel() / int(counted_NS[:, 1:].sum())
            rows = [[*key, {name: factor * each for name, each in losses.items()}] for *key, losses in rows]
        point.save(rows)
    measured = {(layer, tap): losses for layer, tap, losses in rows}
    parts = [[measured[each.layer_idx, group.tap] for group in each.groups] for each in groups]
    return [
        {**{name: sum(part[name] for part in of_each) for name in of_each[0]}, DENSE: 0.0}
        for of_each in parts
    ]


def _facts(
    spec: Mixed,
    groups: Sequence[GroupSchemes],
    options: Sequence[Sequence[Option]],
    best: Allocation,
    costs: Costs,
    arch: Arch,
) -> dict[str, Any]:
    """Return what the report shows: costs as shares of the dense model's, KL in nats a token as the
    sensitivities predict it."""
    is_time = spec.budget.is_time
    corners = thinned(frontier(options), MAX_FRONTIER_POINTS)
    everywhere = {name: allocation(options, _picks_of(name, options)) for name in spec.schemes}

    def shares(found: Allocation) -> dict[str, float]:
        return {"cost": round(found.cost / costs.dense, 6), "kl": significant(found.loss)}

    rows = []
    for idx, (each, of_group, pick) in enumerate(zip(groups, options, best.picks, strict=True)):
        row: dict[str, Any] = {
            "layer": each.layer_idx,
            "projection": each.name,
            "scheme": of_group[pick].scheme,
            "kl": {option.scheme: significant(option.loss) for option in of_group},
            "bytes": {name_of(scheme): each.num_bytes(arch, scheme) for scheme in each.schemes},
        }
        if is_time:
            row["us"] = {name: round(us, 2) for name, us in costs.us[idx].items()}
        rows.append(row)
    return {
        "budget": spec.budget.text,
        "cost": "time" if is_time else "bytes",
        "cost_of_dense": costs.dense / TICKS_PER_US if is_time else costs.dense,
        "limit": round(costs.limit / costs.dense, 6),
        "times_from": sorted(costs.origins),
        "num_samples": spec.num_samples,
        "chosen": shares(best),
        "uniform": {name: shares(each) for name, each in everywhere.items()},
        "frontier": [shares(each) for each in corners],
        "units": rows,
    }


def _picks_of(scheme: str, options: Sequence[Sequence[Option]]) -> list[int]:
    """Return the index of the scheme among the options of each group, and 0 where a group does not have
    it."""
    return [
        next((idx for idx, each in enumerate(of_group) if each.scheme == scheme), 0) for of_group in options
    ]
