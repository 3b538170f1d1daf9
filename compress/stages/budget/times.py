"""Times of the products of linear groups in a decode step, from a table that ships or measured on this
machine.

A choice that rests on measured times must come out the same when a run is resumed, so measured times are kept
in a file of the stage's scratch directory. Times that decide a result are part of its cache key (`depends`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from compress.artifact.resume import ResumePoint
from compress.context import Context
from compress.digest import digest_json
from compress.machine import environment_facts, measure_bandwidth
from compress.models.arch import Arch
from compress.models.linear_groups import LinearGroup
from compress.quant.scheme import Scheme
from compress.runtime.deployment import Deployment
from compress.stages.budget.tables import LatencyTable, Origin, latency_table
from compress.stages.budget.timing import measure_linear_us

TIMES_NAME = "times.json"
MACHINE_FACTS = ("device_key", "device", "threads", "driver")
"""Facts of the machine that measured times depend on."""


class Times(Protocol):
    """Times of one device for a step of a fixed number of tokens."""

    def linear_us(
        self, arch: Arch, group: LinearGroup, scheme: Scheme | None, *, layer_idx: int = 0
    ) -> tuple[float, Origin]:
        """Return the microseconds of the product of a layer's linear group, and where they come from."""

    @property
    def bytes_per_us(self) -> float:
        """Bytes that the device reads in a microsecond."""


@dataclass(frozen=True)
class TableTimes:
    """Times for a step of `rows` tokens from a table that ships."""

    table: LatencyTable
    rows: int

    @property
    def bytes_per_us(self) -> float:
        return self.table.bytes_per_us

    def linear_us(
        self, arch: Arch, group: LinearGroup, scheme: Scheme | None, *, layer_idx: int = 0
    ) -> tuple[float, Origin]:
        n, k = arch.layers[layer_idx].group_shape(group, arch.hidden_size)
        return self.table.linear_us(
            group.name, n, k, scheme, rows=self.rows, dtype=getattr(torch, arch.dtype)
        )


class MeasuredTimes:
    """Times for a step of `rows` tokens on the device of `ctx`, each measured when it is first needed and
    kept in `file`."""

    def __init__(self, file: Path, rows: int, ctx: Context) -> None:
        self._point = ResumePoint(file, ctx.progress.log)
        self._rows = rows
        self._ctx = ctx
        self._kept: dict[str, float] = self._point.load() or {}
        self._announced = False

    @property
    def bytes_per_us(self) -> float:
        return self._time("bytes_per_us", lambda: measure_bandwidth(torch.device(self._ctx.device)) / 1e6)

    def linear_us(
        self, arch: Arch, group: LinearGroup, scheme: Scheme | None, *, layer_idx: int = 0
    ) -> tuple[float, Origin]:
        n, k = arch.layers[layer_idx].group_shape(group, arch.hidden_size)
        key = f"{group.name},{n},{k}" + ("" if scheme is None else f",{scheme.name}")
        device = torch.device(self._ctx.device)
        dtype = getattr(torch, arch.dtype) if device.type == "cuda" else torch.float32
        deployment = Deployment(device, dtype, max_batch_size=self._rows, max_step_tokens=128)
        us = self._time(
            key,
            lambda: measure_linear_us(arch, layer_idx, group, scheme, rows=self._rows, deployment=deployment),
        )
        return us, "measured"

    def _time(self, key: str, measure: Callable[[], float]) -> float:
        if key not in self._kept:
            if not self._announced:
                self._ctx.progress.log("timing the kernels of each linear group and scheme on this device")
                self._announced = True
            self._kept[key] = round(measure(), 3)
            self._point.save(self._kept)
        return self._kept[key]


def times_on(device: str | None, rows: int, file: Path, ctx: Context) -> Times:
    """Return the times of a named device by its table, or of this one, measured and kept in `file`.

    Raises:
        UsageError: no table ships for the named device.
    """
    return MeasuredTimes(file, rows, ctx) if device is None else TableTimes(latency_table(device), rows)


def depends(device: str | None, here: str) -> dict[str, str]:
    """Return what times depend on, for a cache key: the table of the named `device`, or this machine, which
    computes on `here`."""
    if device is None:
        facts = environment_facts(torch.device(here))
        return {"machine": digest_json({name: facts.get(name) for name in MACHINE_FACTS})}
    table = latency_table(device)
    rows = sorted([*product, us] for product, us in table.us.items())
    return {"latency_table": digest_json([table.launch_us, table.bytes_per_us, rows])}
