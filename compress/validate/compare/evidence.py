"""The evidence of one model, read back from its `report.json`: readings with their intervals, and the
conditions under which each of them was measured.

Two readings are compared only where all conditions of their metric are the same: the evaluation tokens, the
source, the machine, the shape of the requests. A condition is a text, so that a report can state it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.untrusted.fields import Fields
from compress.validate.report import SCHEMA
from compress.validate.stats import Array, Estimate

ADVICE = "write the evidence again with `compress validate`."
_WINDOWS = ("nll_candidate", "kl", "top1")
_MACHINE = ("device", "device_key", "threads", "driver")
_LOAD = ("request_rate", "burstiness", "max_concurrency", "num_prompts", "total_input_tokens")
_LARGEST = 1e300
_MAX_COUNT = 1 << 60


@dataclass(frozen=True)
class Reading:
    """A measured number; `unproven` is the reason why its measurement proves nothing, or empty."""

    estimate: Estimate
    unproven: str = ""


@dataclass(frozen=True)
class Evidence:
    """The facts and numbers of the candidate of a report.

    `conditions`: `source`, `text`, `machine`, `latency`, `load`, `tasks.<name>`, each where it is stated.
    `windows`: means of the evaluation windows in their order, by name; empty in reports of earlier versions.
    """

    label: str
    digest: str
    form: str
    source: str
    conditions: Mapping[str, str]
    readings: Mapping[str, Reading]
    windows: Mapping[str, Array] = field(default_factory=dict)


def read_evidence(report: Any, label: str, *, batch_size: int | None = None) -> Evidence:
    """Return the evidence in a report, with the latency at one batch size: the smallest one by default.

    Raises:
        UsageError: it is not a report of schema 1, or has a field of another type.
    """
    where = f"the report of {label}"
    fields = Fields(report, where, lambda sentence: UsageError(f"{sentence} {ADVICE[0].upper()}{ADVICE[1:]}"))
    if fields.integer("schema", 0, 1 << 30) != SCHEMA:
        raise UsageError(f"{where} has another schema than {SCHEMA}, which is read here; {ADVICE}")
    artifact = fields.fields("artifact")
    sides = {
        side: sum(
            Fields(row, f"sizes of {where}", UsageError).integer(f"{side}_bytes", 0, _MAX_COUNT)
            for row in artifact.items("sizes")
        )
        for side in ("source", "candidate")
    }
    readings = {"size_bytes": Reading(Estimate.exact(float(sides["candidate"])))}
    conditions = {"source": artifact.text("source_digest")}
    environment = fields.mapping("environment", default={})
    machine = {name: environment[name] for name in _MACHINE if environment.get(name) is not None}
    if machine:
        conditions["machine"] = ", ".join(_fact(name, value) for name, value in machine.items())
    windows: dict[str, Array] = {}
    if fields.has("accuracy"):
        accuracy = fields.fields("accuracy")
        conditions["text"] = _text(accuracy, fields.fields("calibration", default={}))
        for name, key in (("kl_mean", "kl_mean"), ("ppl", "ppl_candidate"), ("top1", "top1")):
            readings[name] = Reading(_estimate(accuracy.fields(key)))
        windows = _windows(accuracy)
    if fields.has("tasks"):
        _read_tasks(fields.fields("tasks"), readings, conditions)
    if fields.has("latency"):
        _read_latency(fields.fields("latency"), readings, conditions, batch_size)
    if fields.has("load"):
        _read_load(fields.fields("load"), readings, conditions)
    return Evidence(
        label=label,
        digest=artifact.text("digest"),
        form=_form(artifact),
        source=artifact.text("source"),
        conditions=conditions,
        readings=readings,
        windows=windows,
    )


def source_evidence(report: Any, label: str, *, batch_size: int | None = None) -> Evidence:
    """Return what a report states of its source: size, perplexity and latency; its KL to itself is 0.

    Raises:
        UsageError: as `read_evidence`.
    """
    own = read_evidence(report, label, batch_size=batch_size)
    rows = report["artifact"]["sizes"]
    readings = {"size_bytes": Reading(Estimate.exact(float(sum(row["source_bytes"] for row in rows))))}
    if "accuracy" in report:
        found = Fields(report["accuracy"], f"the report of {label}", UsageError)
        readings |= {"kl_mean": Reading(Estimate.exact(0.0)), "top1": Reading(Estimate.exact(1.0))}
        readings["ppl"] = Reading(_estimate(found.fields("ppl_source")))
    timed = dict(report.get("latency", {}))
    if timed.get("source"):
        latency = Fields({"candidate": timed["source"]}, f"latency of {label}", UsageError)
        _read_latency(latency, readings, {}, batch_size)
    return Evidence(own.source, own.conditions["source"], "source", own.source, own.conditions, readings)


def _fact(name: str, value: Any) -> str:
    return f"{name} {value}" if name in ("threads", "driver") else str(value)


def _form(artifact: Fields) -> str:
    """Return the scheme and the KV cache in words."""
    scheme = artifact.text("scheme", default="dense")
    cache = artifact.text("kv_cache", default="")
    return f"{scheme}, KV {cache}" if cache else scheme


def _text(accuracy: Fields, calibration: Fields) -> str:
    windows = accuracy.integer("num_windows", 2, _MAX_COUNT)
    size = accuracy.integer("window_size", 2, _MAX_COUNT)
    title = calibration.text("evaluation_data", default="text")
    digest = calibration.text("evaluation_digest", default="")
    return f"{windows} x {size} tokens of {title} ({digest.removeprefix('sha256:')[:12] or 'no digest'})"


def _estimate(fields: Fields) -> Estimate:
    return Estimate(*(fields.number(name, -_LARGEST, _LARGEST) for name in ("value", "lower", "upper")))


def _windows(accuracy: Fields) -> dict[str, Array]:
    if not accuracy.has("windows"):
        return {}
    listed = accuracy.fields("windows")
    found = {name: np.array(listed.numbers(name, -_LARGEST, _LARGEST)) for name in _WINDOWS}
    if len({each.size for each in found.values()} | {accuracy.integer("num_windows", 2, _MAX_COUNT)}) != 1:
        raise UsageError(f"{accuracy.where} lists other windows than it counts; {ADVICE}")
    return found


def _read_tasks(tasks: Fields, readings: dict[str, Reading], conditions: dict[str, str]) -> None:
    """Read the share of right answers of each task, with the interval of its paired drop from the source."""
    for each in tasks.items("rows"):
        row = Fields(each, tasks.where, UsageError)
        name = f"tasks.{row.text('name')}"
        source, share = (row.number(side, 0, 1) for side in ("source", "candidate"))
        drop = _estimate(row.fields("drop"))
        readings[name] = Reading(Estimate(share, source - drop.upper, source - drop.lower))
        facts = [str(value) for value in row.mapping("facts", default={}).values()]
        count = f"{row.integer('num_items', 1, _MAX_COUNT)} items"
        conditions[name] = ", ".join([count, row.text("metric"), *facts])


def _read_latency(
    latency: Fields, readings: dict[str, Reading], conditions: dict[str, str], batch_size: int | None
) -> None:
    rows = [Fields(row, latency.where, UsageError) for row in latency.items("candidate", default=())]
    sizes = {row.integer("batch_size", 1, 1 << 20): row for row in rows}
    if not sizes or (batch_size is not None and batch_size not in sizes):
        return
    chosen = min(sizes) if batch_size is None else batch_size
    row = sizes[chosen]
    prompt, output = (row.integer(f"{name}_tokens", 1, 1 << 30) for name in ("prompt", "output"))
    conditions["latency"] = f"batch {chosen}, {prompt} prompt and {output} output tokens"
    for name in ("ttft_ms_p50", "tpot_ms_p50"):
        ends = (row.number(each, -_LARGEST, _LARGEST) for each in (name, f"{name}_lower", f"{name}_upper"))
        readings[name] = Reading(Estimate(*ends), row.text(f"{name[:4]}_instability", default=""))


def _read_load(load: Fields, readings: dict[str, Reading], conditions: dict[str, str]) -> None:
    rows = [Fields(row, load.where, UsageError) for row in load.items("rows", default=())]
    for row in (each for each in rows if each.text("target") == "candidate"):
        stated = load.items("rows")[rows.index(row)]
        facts = [f"{name} {stated[name]}" for name in _LOAD if stated.get(name) is not None]
        conditions["load"] = ", ".join(facts).replace("_", " ")
        value = row.number("output_throughput", 0, _LARGEST)
        ends = [
            row.number(f"output_throughput_{end}", 0, _LARGEST, default=value) for end in ("least", "largest")
        ]
        readings["output_throughput"] = Reading(Estimate(value, *ends), row.text("instability", default=""))
