"""`validate`: measure the artifact against its source, compare the numbers with the recipe's gates, and write
the report.

Both models run through the bundled runtime's own path; the numbers that are gated are the numbers that would
be served. A model that was quantized by tensor name runs through transformers instead, without latency.

    spec.py        the stage's keys in a recipe
    assistants.py  the assistant that a recipe names for speculation
    apart.py       models scored one after the other, for those of which the memory holds only one
    by_name.py     the report of a model that was quantized by tensor name, measured through transformers
    measure.py     all measurements: accuracy, speed.py (latency, roofline), load.py, speculation
    candidate.py   what the candidate states of itself, with a manifest or without
    evidence.py    facts that are read, not measured: sizes, schemes, licences, data
    tasks.py       benchmarks; generation.py texts of both models, and long contexts
    journey.py     one row for each model between source and candidate
    estimate.py    memory and work, for `plan`
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import write_atomic
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.card import identity, load_card
from compress.data.model_tokens import data_identity
from compress.digest import digest_file, digest_json
from compress.export import is_graph, open_weights, serve_command
from compress.machine import device_key, environment_facts
from compress.stages import STAGES, Inputs, Port
from compress.stages.validate.assistants import assistant_identity
from compress.stages.validate.by_name import is_by_name, prove_by_name
from compress.stages.validate.candidate import candidate_facts
from compress.stages.validate.estimate import estimate
from compress.stages.validate.evidence import (
    MODEL_CARD,
    artifact_facts,
    calibration_facts,
    dense_facts,
    layer_rows,
    license_of,
    quantization,
    served_cache,
    size_of,
    sizes_of,
)
from compress.stages.validate.journey import Journey
from compress.stages.validate.measure import Measured, measure
from compress.stages.validate.proposers import draft_facts, draft_method, draft_path
from compress.stages.validate.spec import LOAD, QUANTIZE, Speculation, Validate, read_gates
from compress.validate import stats
from compress.validate.card import render_markdown_card
from compress.validate.display import shell_word
from compress.validate.gates import GateResult, evaluate
from compress.validate.parts import Part
from compress.validate.parts.accuracy import AccuracyPart
from compress.validate.parts.artifact import ArtifactPart
from compress.validate.parts.experts import ExpertsPart
from compress.validate.parts.gates import GatesPart
from compress.validate.parts.generation import GenerationPart
from compress.validate.parts.journey import JourneyPart
from compress.validate.parts.kernels import KernelsPart
from compress.validate.parts.kv_cache import KVCachePart
from compress.validate.parts.latency import LatencyPart
from compress.validate.parts.layers import LayersPart
from compress.validate.parts.load import LoadPart
from compress.validate.parts.long_context import LongContextPart
from compress.validate.parts.mixed import MixedPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.parts.pruning import PruningPart
from compress.validate.parts.recovery import RecoveryPart
from compress.validate.parts.roofline import RooflinePart
from compress.validate.parts.scoring import ScoringPart
from compress.validate.parts.speculation import SpeculationPart
from compress.validate.parts.tasks import TasksPart
from compress.validate.report import build_report, render_html

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"


def _depends(spec: Validate, device: str) -> Mapping[str, str]:
    """Return digests of the evaluation text and of the machine: no latency is reused on another machine."""
    facts = environment_facts(torch.device(device))
    machine = {name: facts.get(name) for name in ("device_key", "device", "threads", "driver")}
    stated = {} if spec.speculative is None else spec.speculative.data
    prompts = {f"prompts {category}": identity(load_card(card)) for category, card in stated.items()}
    prompts |= {f"task {task.name}": task.identity() for task in spec.tasks}
    prompts |= assistant_identity(spec.speculative)
    if spec.generation is not None:
        prompts["generation"] = digest_file(Path(spec.generation.prompts))
    if spec.long_context is not None and spec.long_context.data is not None:
        prompts["long context"] = identity(load_card(spec.long_context.data))
    return {**data_identity(spec, device), **prompts, "machine": digest_json(machine)}


@STAGES.stage(
    "validate",
    version=17,
    takes=(Port.SOURCE, (Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)),
    uses=(Port.CALIB, Port.QUANTIZED, Port.DENSE, Port.DRAFT),
    gives=Port.EVIDENCE,
    spec=Validate,
    estimate=estimate,
    depends=_depends,
)
def validate(spec: Validate, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    """Write the report as JSON and as a page, and the model card."""
    report = prove(spec, inputs, ctx)
    write_atomic(out.path / REPORT_JSON, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(out.path / REPORT_HTML, render_html(report).encode())
    k = (spec.speculative or Speculation()).k
    form = report["artifact"].get("format")
    card = render_markdown_card(
        report,
        base_model=inputs.source.name,
        license_id=license_of(inputs),
        serve_command=serve_command(
            _kept_by_others(inputs, report["artifact"].get("kv_cache")),
            form=form,
            method=draft_method(inputs),
            k=k,
        ),
        library_name=None if is_graph(form) else "transformers",
        eval_command=f"compress validate <this directory> --against {shell_word(inputs.source.name)} "
        f"--data {shell_word(spec.data)}",
    )
    write_atomic(out.path / MODEL_CARD, card.encode())
    facts = {"verdict": report["verdict"], "gates": report.get("gates", [])}
    out.describe(
        role="evidence", facts=facts | ({"warnings": report["warnings"]} if "warnings" in report else {})
    )


def _kept_by_others(inputs: Inputs, kv_format: str | None) -> str | None:
    """Return the format of a KV cache, None where other programs cache latents and no format is theirs."""
    if kv_format is None or open_weights(inputs.source.path).arch.has_latents:
        return None
    return kv_format


def prove(spec: Validate, inputs: Inputs, ctx: Context) -> dict[str, Any]:
    """Measure everything and return the report document.

    Raises:
        UsageError: as `measure`.
    """
    _, candidate = inputs.first(Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)
    if is_by_name(candidate.path):
        return prove_by_name(spec, inputs, candidate, ctx)
    measured = measure(spec, inputs, candidate.path, ctx)
    device = torch.device(ctx.device)
    stated = candidate_facts(candidate.path)
    scheme = stated.scheme
    dense = dense_facts(inputs)
    sizes = sizes_of(measured.paths["source"], candidate.path)
    draft = draft_path(inputs)
    draft_bytes = None if draft is None else size_of(draft)
    kv_cache = served_cache(stated.kv_cache, measured.candidate)
    quantized = quantization(inputs)
    gates = _gates(spec, measured, sizes, device, quantized=Port.QUANTIZED in inputs.ports)
    journey = _journey(measured, dense, draft_bytes, quantized=scheme is not None)
    parts: list[Part] = [
        GatesPart(gates),
        AccuracyPart(measured.accuracy["source", "candidate"]),
        JourneyPart(journey.rows()),
        LatencyPart(measured.latency.get("source", ()), measured.latency.get("candidate", ())),
        RooflinePart(measured.roofs),
        KernelsPart(measured.candidate.kernel_report()),
        LayersPart(
            layer_rows(inputs, scheme),
            quantized.get("guided", False),
            quantized.get("tuning"),
            quantized.get("data_free", False),
        ),
        ArtifactPart(artifact_facts(inputs, candidate, stated, sizes, kv_cache, draft_bytes)),
        ProvenancePart(
            calibration=calibration_facts(inputs, measured.tokens, measured.data_facts),
            environment=environment_facts(device),
        ),
    ]
    if measured.tasks:
        parts.append(TasksPart(measured.tasks))
    if measured.texts and spec.generation is not None:
        parts.append(GenerationPart(measured.texts, spec.generation.model_dump(exclude={"prompts"})))
    if measured.long_context:
        parts.append(LongContextPart(measured.long_context))
    if measured.load:
        parts.append(LoadPart(measured.load))
    if measured.scoring is not None:
        parts.append(ScoringPart(measured.scoring))
    if kv_cache is not None:
        parts.append(KVCachePart(kv_cache))
    if measured.speculation is not None:
        facts = measured.conditions | measured.speculation.as_json() | {"draft": draft_facts(inputs)}
        parts.append(SpeculationPart(facts))
    if "experts" in quantized:
        parts.append(ExpertsPart(quantized["experts"]))
    if "mixed" in quantized:
        parts.append(MixedPart(quantized["mixed"]))
    if "pruning" in dense:
        parts.append(PruningPart(dense["pruning"]))
    if "distillation" in dense or "recovery" in quantized:
        parts.append(RecoveryPart(dense.get("distillation"), quantized.get("recovery")))
    pruned = ", pruned," if "pruning" in dense else ""
    form = "dense weights" if scheme is None else scheme.name
    return build_report(title=f"{inputs.source.name}{pruned} in {form}", parts=parts)


def _journey(
    measured: Measured, dense: Mapping[str, Any], draft_bytes: int | None, *, quantized: bool
) -> Journey:
    return Journey(
        dense_facts=dense,
        quantized=quantized,
        sizes={side: size_of(path) for side, path in measured.paths.items()},
        draft_bytes=draft_bytes,
        accuracy=measured.accuracy,
        latency=measured.latency,
        speculation=measured.speculation,
    )


def _gates(
    spec: Validate, measured: Measured, sizes: list[dict[str, Any]], device: torch.device, *, quantized: bool
) -> list[GateResult]:
    """Compare what was measured with the limits of the recipe.

    Gates on latency look at the first batch size, those on size at the model without its draft. A metric that
    latency and load both measure is that of latency, and with `load.` before its name that of load.
    `quantized`: the recipe has quantized, and what it quantized is the source unless other weights were
    measured too.
    """
    total = {side: sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")}
    whole = measured.accuracy["source", "candidate"]
    metrics = whole.metrics() | {"size_ratio": stats.Estimate.exact(total["candidate"] / total["source"])}
    unproven: dict[str, str] = {}
    if quantized:
        alone = measured.accuracy.get(("dense", "candidate"), whole).metrics()
        metrics |= {f"{QUANTIZE}.{name}": value for name, value in alone.items()}
    if latency := measured.latency.get("candidate"):
        metrics |= latency[0].metrics()
        unproven |= latency[0].unproven()
    for row in (each for each in measured.load if each.target == "candidate"):
        for name, value in row.metrics().items():
            reason = row.unproven().get(name)
            own = (f"{LOAD}.{name}", *((name,) if name not in metrics else ()))
            metrics |= dict.fromkeys(own, value)
            unproven |= dict.fromkeys(own, reason) if reason else {}
    for task in measured.tasks:
        metrics |= task.metrics()
    if measured.speculation is not None:
        metrics |= measured.speculation.metrics
        unproven |= measured.speculation.unproven
    return evaluate(read_gates(spec.gates), metrics, device=device_key(device), unproven=unproven)
