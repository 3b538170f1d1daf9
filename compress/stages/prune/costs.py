"""What a pruned model costs: parameters, or the time of one decode step in 16 bits. That is the kernels of each layer's linears and of the
head, by this device or by a table that ships, and the reading of a cache of `context` positions."""

import json
from collections.abc import Callable, Sequence

import torch

from compress.artifact.atomic import write_atomic
from compress.context import Context
from compress.digest import canonical_json, digest_json
from compress.kernels.coverage import linear_shape
from compress.kernels.latency import latency_table
from compress.machine import environment_facts, measure_bandwidth
from compress.models.arch import LINEAR_GROUPS, Arch
from compress.models.pruning import Widths, resized, with_layers
from compress.runtime.deployment import Deployment
from compress.runtime.linear_time import linear_time_us
from compress.stages.prune.spec import Target

SEARCH_NAME = "search"
TIMES_NAME = "times.json"


def depends(target: Target, device: str) -> dict[str, str]:
    """What decides the choice besides the recipe: whose times count."""
    if target.latency_frac is None:
        return {}
    if target.device is not None:
        return {
            "table": digest_json(sorted((*what, us) for what, us in latency_table(target.device).us.items()))
        }
    facts = environment_facts(torch.device(device))
    return {
        "machine": digest_json(
            {name: facts.get(name) for name in ("device_key", "device", "threads", "driver")}
        )
    }


def costs_of(combined: Sequence[Widths], target: Target, arch: Arch, ctx: Context) -> list[float]:
    """Parameters, or microseconds of a step, of a model with each of these widths."""
    shaped = [resized(with_layers(arch, range(each.num_layers)), each) for each in combined]
    if target.params_frac is not None:
        return [float(each.num_params) for each in shaped]
    linear_us, bytes_per_us = _timer(target, arch, ctx)
    return [_step_us(each, target, linear_us, bytes_per_us) for each in shaped]


def _step_us(
    arch: Arch, target: Target, linear_us: Callable[[Arch, str], float], bytes_per_us: float
) -> float:
    """The linears of all layers, the head, and one reading of the keys and values."""
    shape = arch.layers[0]
    kv_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim * target.rows * target.context
    head_us = 2 * arch.vocab_size * arch.hidden_size / bytes_per_us
    return (
        arch.num_layers * (sum(linear_us(arch, name) for name in LINEAR_GROUPS) + kv_bytes / bytes_per_us)
        + head_us
    )


def _timer(target: Target, arch: Arch, ctx: Context) -> tuple[Callable[[Arch, str], float], float]:
    """Microseconds of a projection of the first layer of a model, and bytes that are read in one."""
    dtype = getattr(torch, arch.dtype)
    if target.device is not None:
        table = latency_table(target.device)

        def by_table(shaped: Arch, name: str) -> float:
            n, k = linear_shape(shaped, name, layer_idx=0)
            return table.linear_us(name, n, k, None, rows=target.rows, dtype=dtype)[0]

        return by_table, table.bytes_per_us
    file = ctx.scratch / SEARCH_NAME / TIMES_NAME
    device = torch.device(ctx.device)
    known: dict[str, float] = json.loads(file.read_bytes()) if file.exists() else {}
    place = Deployment(
        device,
        dtype if device.type == "cuda" else torch.float32,
        max_batch_size=target.rows,
        max_step_tokens=128,
    )

    def kept(key: str, measure: Callable[[], float]) -> float:
        if key not in known:
            known[key] = round(measure(), 3)
            write_atomic(file, canonical_json(known))
        return known[key]

    def by_clock(shaped: Arch, name: str) -> float:
        n, k = linear_shape(shaped, name, layer_idx=0)
        return kept(
            f"{name},{n},{k}", lambda: linear_time_us(shaped, 0, name, None, rows=target.rows, target=place)
        )

    return by_clock, kept("bytes_per_us", lambda: measure_bandwidth(device) / 1e6)
