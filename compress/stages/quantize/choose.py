"""Mixed precision: which scheme each projection gets, by what it costs in accuracy and in bytes or time.

Sensitivities come from one backward pass over part of the calibration set (`stages/budget/sensitivity.py`), costs from `costs.py`;
`stages/budget/allocation.py` chooses. The choice is then what per-layer overrides are.

What was measured lies in the scratch directory before anything is decided by it, so that a resumed run decides the same.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.calibrate.gradients import visit_gradients
from compress.context import Context
from compress.digest import canonical_json, digest_json, significant
from compress.errors import UsageError
from compress.kernels.latency import latency_table
from compress.machine import environment_facts
from compress.models.arch import LINEAR_GROUPS, Arch
from compress.models.weights import WeightSource
from compress.quant.scheme import DENSE, ModelScheme, commonest, name_of
from compress.runtime.deployment import Deployment
from compress.runtime.linear_time import linear_time_us
from compress.stages.budget.allocation import Option, Point, allocate, frontier, point
from compress.stages.budget.sensitivity import Sensitivities
from compress.stages.quantize.costs import TICKS_PER_US, Costs, Times, Unit, asked, costs_of, times_of
from compress.stages.quantize.mixed import Budget, Mixed

SENSITIVITIES_NAME = "sensitivities.json"
LATENCIES_NAME = "latencies.json"
MAX_FRONTIER_POINTS = 100


def depends(spec: Mixed, device: str) -> dict[str, str]:
    """What decides the choice besides the recipe: the device whose kernels are timed, or the table that stands for it."""
    if not spec.budget.of_time:
        return {}
    if spec.budget.device is None:
        facts = environment_facts(torch.device(device))
        return {"machine": digest_json([facts.get(name) for name in ("device_key", "device", "driver")])}
    table = latency_table(spec.budget.device)
    return {
        "latency_table": digest_json(
            [table.launch_us, table.bytes_per_us, sorted([*what, us] for what, us in table.us.items())]
        )
    }


def choose(
    spec: Mixed,
    units: Sequence[Unit],
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    outer_bytes: int,
) -> tuple[ModelScheme, dict[str, Any]]:
    """The schemes (the head's not among them), and the facts that explain them.

    Raises:
        UsageError: no choice keeps the budget, or every linear may stay dense.
    """
    times = None
    if spec.budget.of_time:
        named = spec.budget.device
        times = (
            _measured(spec.budget, units, source.arch, ctx)
            if named is None
            else times_of(named, spec.budget.rows, units, source.arch)
        )
    costs = costs_of(spec.budget, units, source.arch, outer_bytes=outer_bytes, times=times)
    losses = _sensitivities(spec, units, source, tokens_NS, ctx, compute_dtype)
    options = [
        [Option(scheme, losses[unit.layer_idx, unit.name][scheme], cost) for scheme, cost in of_unit.items()]
        for unit, of_unit in zip(units, costs.by_unit, strict=True)
    ]
    best = allocate(options, costs.limit)
    chosen = {
        linear: unit.schemes[pick]
        for unit, pick in zip(units, best.picks, strict=True)
        for linear in unit.linears
    }
    if not any(chosen.values()):
        raise UsageError(
            f"the budget {spec.budget.text} leaves every linear dense: there is nothing to quantize. Leave out the stage instead."
        )
    return commonest(chosen), _facts(spec, units, options, best, costs, source.arch)


def _sensitivities(
    spec: Mixed,
    units: Sequence[Unit],
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    compute_dtype: torch.dtype,
) -> dict[tuple[int, str], dict[str, float]]:
    """(layer, projection) -> scheme -> predicted KL; measured once and kept."""
    kept = ctx.scratch / SENSITIVITIES_NAME
    if not kept.exists():
        schemes = list(
            dict.fromkeys(scheme for unit in units for scheme in unit.schemes if scheme is not None)
        )
        visitor = Sensitivities(schemes, getattr(torch, source.arch.dtype))
        sampled_NS = tokens_NS[: spec.num_samples]
        draws_NS = torch.rand(sampled_NS.shape, generator=ctx.rng("sensitivities", "labels"))
        visit_gradients(source, sampled_NS, visitor, ctx, compute_dtype=compute_dtype, draws_NS=draws_NS)
        write_atomic(kept, canonical_json([[*key, losses] for key, losses in visitor.loss.items()]))
    measured = {(layer, tap): losses for layer, tap, losses in json.loads(kept.read_bytes())}
    return {
        (unit.layer_idx, unit.name): {**measured[unit.layer_idx, LINEAR_GROUPS[unit.name].tap], DENSE: 0.0}
        for unit in units
    }


def _measured(budget: Budget, units: Sequence[Unit], arch: Arch, ctx: Context) -> Times:
    """Times of this device, measured once and kept."""
    kept = ctx.scratch / LATENCIES_NAME
    device = torch.device(ctx.device)
    if not kept.exists():
        ctx.progress.say("timing the kernels of each projection and scheme")
        dtype = getattr(torch, arch.dtype) if device.type == "cuda" else torch.float32
        target = Deployment(device, dtype, max_batch_size=budget.rows, max_step_tokens=128)
        layer_of = {(unit.name, unit.n, unit.k): unit.layer_idx for unit in units}
        rows = []
        for name, n, k, scheme in asked(units):
            us = linear_time_us(arch, layer_of[name, n, k], name, scheme, rows=budget.rows, target=target)
            rows.append([name, n, k, name_of(scheme), round(us, 2)])
        write_atomic(kept, canonical_json(rows))
    return {
        (name, n, k, scheme): (us, "measured") for name, n, k, scheme, us in json.loads(kept.read_bytes())
    }


def _facts(
    spec: Mixed,
    units: Sequence[Unit],
    options: Sequence[Sequence[Option]],
    best: Point,
    costs: Costs,
    arch: Arch,
) -> dict[str, Any]:
    """What the report shows. Costs are shares of the dense model's, KL in nats a token, as the sensitivities predict it."""
    times = costs.times
    corners = frontier(options)
    if len(corners) > MAX_FRONTIER_POINTS:
        step = (len(corners) - 1) / (MAX_FRONTIER_POINTS - 1)
        corners = [corners[round(idx * step)] for idx in range(MAX_FRONTIER_POINTS)]
    everywhere = {
        name: point(
            options,
            [
                next((idx for idx, each in enumerate(of_unit) if each.scheme == name), 0)
                for of_unit in options
            ],
        )
        for name in spec.schemes
    }

    def said(at: Point) -> dict[str, float]:
        return {"cost": round(at.cost / costs.dense, 6), "kl": significant(at.loss)}

    rows = []
    for unit, of_unit, pick in zip(units, options, best.picks, strict=True):
        row: dict[str, Any] = {
            "layer": unit.layer_idx,
            "projection": unit.name,
            "scheme": of_unit[pick].scheme,
        }
        row["kl"] = {each.scheme: significant(each.loss) for each in of_unit}
        row["bytes"] = {name_of(scheme): unit.num_bytes(arch, scheme) for scheme in unit.schemes}
        if times is not None:
            row["us"] = {
                each.scheme: round(times[unit.name, unit.n, unit.k, each.scheme][0], 2) for each in of_unit
            }
        rows.append(row)
    return {
        "budget": spec.budget.text,
        "cost": "bytes" if times is None else "time",
        "cost_of_dense": costs.dense if times is None else costs.dense / TICKS_PER_US,
        "limit": round(costs.limit / costs.dense, 6),
        "times_from": [] if times is None else sorted({origin for _, origin in times.values()}),
        "num_samples": spec.num_samples,
        "chosen": said(best),
        "uniform": {name: said(each) for name, each in everywhere.items()},
        "frontier": [said(each) for each in corners],
        "units": rows,
    }
