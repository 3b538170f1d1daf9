"""The report: one JSON document, and the same content as one self-contained HTML page (inline SVG, no script, nothing loaded).

`build_report` gathers parts that other stages measured; a part that was not measured is absent from the document and from the page. The
document holds plain JSON values only. `render_html` is a pure function of the document: the same document gives the same bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jinja2
from markupsafe import Markup

from compress.validate.accuracy import Accuracy
from compress.validate.gates import GateResult
from compress.validate.latency import LatencyRow
from compress.validate.plots import kl_plot, latency_plot, layer_error_plot, mixed_plot, size_plot
from compress.validate.pruning_plots import pruning_plots, rows_of_source
from compress.validate.recovery_plot import recovery_plot
from compress.validate.roofline import RooflineRow
from compress.validate.speculation_plots import speculation_plots

Json = dict[str, Any]

SCHEMA = 1
_WORST_LAYERS = 8


def build_report(
    *,
    title: str,
    recipe: Mapping[str, Any] | None = None,
    artifact: Mapping[str, Any] | None = None,
    layers: Sequence[Mapping[str, Any]] = (),
    guided: bool = False,
    tuning: Mapping[str, Any] | None = None,
    mixed: Mapping[str, Any] | None = None,
    pruning: Mapping[str, Any] | None = None,
    distillation: Mapping[str, Any] | None = None,
    accuracy: Accuracy | None = None,
    latency_source: Sequence[LatencyRow] = (),
    latency_candidate: Sequence[LatencyRow] = (),
    kernels: Sequence[Mapping[str, Any]] = (),
    roofline: Sequence[RooflineRow] = (),
    stages: Sequence[Mapping[str, Any]] = (),
    speculation: Mapping[str, Any] | None = None,
    gates: Sequence[GateResult] = (),
    calibration: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    kv_cache: Mapping[str, Any] | None = None,
) -> Json:
    """The document, schema 1.

    Args:
        recipe: facts to print: at least `digest`; `text` is shown as it is.
        artifact: `digest`, `source`, `source_digest`, `scheme`, ... and `sizes`: rows {kind, source_bytes, candidate_bytes}.
        layers: rows {layer, linear, error_before, error_after} and, where known, error_rtn, damping, ..., and scheme where linears differ.
        guided: whether tokens counted differently in the errors of `layers`.
        tuning: what training the scales did, as `stages/quantize/tune.py` says it.
        mixed: how schemes were chosen, as `stages/budget/choose.py` says it.
        pruning: what went, as `stages/prune` says it.
        distillation: how it was brought back, as `stages/distill` says it.
        kernels: the engine's `kernel_report()`.
        stages: rows {stage, size_bytes} and, where known, kl_source, kl_before (to the row above), top1, ppl, batch_size, tpot_ms, note.
        speculation: conditions, rows of `validate/speculation.py`, and `draft`: how the draft was made, or None.
        calibration: facts to print; `overlap` states the check of calibration against evaluation text.
        environment: `machine.environment_facts`, and what the caller adds (versions, date, command).
        kv_cache: `format`, and where scales were calibrated `layers`, rows {layer, cache, amax, scale, saturated_frac, flushed_frac,
            worst_head, error, error_token_head}, and a `warning` or None.
    """
    latency = {
        "source": [row.as_json() for row in latency_source],
        "candidate": [row.as_json() for row in latency_candidate],
    }
    parts: Json = {
        "warnings": _warnings(kv_cache, speculation),
        "recipe": recipe,
        "artifact": artifact,
        "gates": [asdict(gate) for gate in gates],
        "accuracy": accuracy.as_json() if accuracy else None,
        "latency": {side: rows for side, rows in latency.items() if rows},
        "roofline": [row.as_json() for row in roofline],
        "stages": list(stages),
        "speculation": speculation,
        "kernels": list(kernels),
        "layers": list(layers),
        "guided": guided,
        "tuning": tuning,
        "kv_cache": kv_cache,
        "mixed": mixed,
        "pruning": pruning,
        "distillation": distillation,
        "calibration": calibration,
        "environment": environment,
    }
    document = {"schema": SCHEMA, "title": title, "verdict": verdict(gates)} | {
        name: part for name, part in parts.items() if part
    }
    return json.loads(json.dumps(document, allow_nan=False))


def _warnings(kv_cache: Mapping[str, Any] | None, speculation: Mapping[str, Any] | None) -> list[str]:
    warnings = [kv_cache["warning"]] if kv_cache is not None and kv_cache.get("warning") else []
    if speculation is not None and speculation["num_equal"] < speculation["num_compared"]:
        differ = speculation["num_compared"] - speculation["num_equal"]
        warnings.append(
            f"Speculation changed {differ} of {speculation['num_compared']} continuations that it must not change."
        )
    return warnings


def verdict(gates: Sequence[GateResult]) -> Json:
    """`passed` is None when no gate applied: then nothing was promised and nothing may be concluded."""
    decided = [gate for gate in gates if gate.passed is not None]
    reasons = [_reason(gate) for gate in decided if not gate.passed]
    passed = None if not decided else not reasons
    return {
        "passed": passed,
        "reasons": reasons,
        "num_decided": len(decided),
        "num_not_applicable": len(gates) - len(decided),
    }


def render_html(report: Json) -> str:
    """One page, readable offline and in print."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("compress.validate", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "num": number,
        "bytes": byte_size,
        "pct": percent,
        "label": label,
        "plain": "{:g}".format,
    }
    return environment.get_template("report.html.j2").render(
        report=report,
        plots=_plots(report),
        worst_layers=_worst_layers(report),
        pruned_layers=rows_of_source(report["pruning"]) if "pruning" in report else [],
        worst_caches=_worst_caches(report),
        kernels=_kernels(report),
        on_reference_path=_on_reference_path(report),
        refusals=_refusals(report),
        totals=_totals(report),
    )


def number(value: float | int | None, digits: int = 3) -> str:
    """`digits` significant figures, thousands separated; powers of ten only where they save the reader counting zeros."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa} × 10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}"


def byte_size(value: float) -> str:
    """Decimal units, as disks and bandwidths count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:g} B"


def percent(value: float, decimals: int = 1) -> str:
    """A share; agreement just short of all is never rounded up to all."""
    shown = f"{value * 100:.{decimals}f}"
    return f"> {100 - 10**-decimals:.{decimals}f} %" if value < 1 and float(shown) >= 100 else f"{shown} %"


_LABELS = {
    "kv_cache": "KV cache",
    "ppl_ratio": "Perplexity ratio",
    "bits_per_byte": "Bits per byte",
    "kl": "KL",
    "kl_mean": "Mean KL",
    "kl_p99": "KL, 99th percentile",
    "kl_p999": "KL, 99.9th percentile",
    "kl_max": "KL, largest",
    "top1": "Top-1 agreement",
    "size_ratio": "Size ratio",
    "ttft_ms_p50": "Time to first token, median (ms)",
    "ttft_ms_p95": "Time to first token, p95 (ms)",
    "tpot_ms_p50": "Time per token, median (ms)",
    "tpot_ms_p95": "Time per token, p95 (ms)",
    "tpot_ms_p99": "Time per token, p99 (ms)",
    "itl_ms_p99": "Gap between tokens, p99 (ms)",
    "output_tokens_per_s": "Output tokens per second",
    "floor_frac": "Share of the floor",
    "acceptance_length": "Acceptance length",
    "speedup": "Speed-up by speculation",
}


def label(name: str) -> str:
    """Words for a metric's or a fact's name; `<stage>.<metric>` is of what that stage alone did."""
    stage, _, metric = name.rpartition(".")
    words = _LABELS.get(metric, metric.replace("_", " ").capitalize())
    return f"{words}, {stage} alone" if stage else words


def _reason(gate: GateResult) -> str:
    if gate.value is None or gate.bound is None:
        return f"{label(gate.name)}: {gate.note}."
    relation = "above" if gate.relation == "<=" else "below"
    note = f" ({gate.note})" if gate.note else ""
    return f"{label(gate.name)} is {number(gate.value, 4)}, its bound {number(gate.bound, 4)} is {relation} the limit {gate.limit:g}{note}."


def _plots(report: Json) -> dict[str, Markup]:
    """Markup is trusted here because matplotlib wrote it and escapes what it is given."""
    plots: dict[str, str] = {}
    if "accuracy" in report:
        plots["kl"] = kl_plot(report["accuracy"])
    if "candidate" in report.get("latency", {}):
        plots["latency"] = latency_plot(report["latency"])
    if "layers" in report:
        plots["layers"] = layer_error_plot(report["layers"])
    if "mixed" in report:
        plots["mixed"] = mixed_plot(report["mixed"])
    if "pruning" in report:
        plots |= pruning_plots(report["pruning"])
    if "distillation" in report:
        plots["recovery"] = recovery_plot(report["distillation"])
    if "speculation" in report:
        plots |= speculation_plots(report["speculation"])
    if report.get("artifact", {}).get("sizes"):
        plots["size"] = size_plot(report["artifact"]["sizes"])
    return {name: Markup(svg) for name, svg in plots.items()}


def _worst_layers(report: Json) -> list[Json]:
    """The linears that lost most; ties in the order of the model."""
    return sorted(report.get("layers", []), key=lambda row: -float(row["error_after"]))[:_WORST_LAYERS]


def _worst_caches(report: Json) -> list[Json]:
    """The keys or values of layers that a calibrated scale holds least."""
    return sorted(report.get("kv_cache", {}).get("layers", []), key=lambda row: -float(row["error"]))[
        :_WORST_LAYERS
    ]


def _kernels(report: Json) -> list[Json]:
    """The engine's rows with equal layers joined: 32 layers of one shape are one line."""
    layers_of: dict[str, list[int]] = {}
    row_of: dict[str, Json] = {}
    for row in report.get("kernels", []):
        what = json.dumps({name: value for name, value in row.items() if name != "layer"}, sort_keys=True)
        row_of[what] = row
        layers_of.setdefault(what, []).extend([row["layer"]] if row["layer"] is not None else [])
    return [{**row, "layers": ranges(layers_of[what])} for what, row in row_of.items()]


def _refusals(report: Json) -> list[tuple[str, list[str]]]:
    """Why faster kernels stood aside where the reference served: reason, and the kernels that gave it."""
    kernels_of: dict[str, set[str]] = {}
    for row in report.get("kernels", []):
        if row["kernel"].startswith("reference"):
            for kernel, reason in row["refused"].items():
                kernels_of.setdefault(reason, set()).add(kernel)
    return [(reason, sorted(kernels)) for reason, kernels in kernels_of.items()]


def _on_reference_path(report: Json) -> bool:
    """Whether a quantized linear was served from dequantized weights."""
    return any("dequantized" in row.get("kernel", "") for row in report.get("kernels", []))


def ranges(numbers: list[int]) -> str:
    """`0–3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _totals(report: Json) -> Json | None:
    sizes = report.get("artifact", {}).get("sizes")
    if not sizes:
        return None
    return {side: sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")}
