"""`validate`: what the artifact proves about itself against the source model: accuracy, latency, gates, report.

Both models run through the bundled runtime's own path; the numbers that are gated are the numbers that would be served.

spec.py   what a recipe may say    speed.py   latency and roofline    speculation.py   serving with a draft    journey.py   stage by stage
evidence.py   all that is not measured    estimate.py   for `plan`
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.card import identity, load_card
from compress.calibrate.dataset import TokenSet
from compress.digest import digest_json
from compress.errors import UsageError
from compress.export import open_weights, serve_command
from compress.quant.scheme import ModelScheme
from compress.runtime.engine import Engine
from compress.stages import STAGES, Inputs, Port
from compress.stages.calibrate import data_identity, read_tokens
from compress.stages.validate.estimate import estimate
from compress.stages.validate.evidence import (
    MODEL_CARD,
    calibration_facts,
    dense_facts,
    exceptions_of,
    layer_rows,
    license_of,
    quantization,
    served_cache,
    size_of,
    sizes_of,
)
from compress.stages.validate.journey import Journey
from compress.stages.validate.spec import QUANTIZE, Speculation, Validate, read_gates
from compress.stages.validate.speculation import draft_facts, draft_method, draft_path, proposers_of, speculate
from compress.stages.validate.speed import roofs_of, time_engine
from compress.validate import stats
from compress.validate.accuracy import Accuracy, measure_pairs
from compress.validate.card import render_markdown_card
from compress.validate.gates import GateResult, evaluate
from compress.validate.latency import LatencyRow
from compress.validate.report import build_report, render_html
from compress.validate.roofline import RooflineRow, device_key, environment_facts, measure_bandwidth, measure_matmul_rate
from compress.validate.speculation import SpeculationEvidence

REPORT_JSON, REPORT_HTML = "report.json", "report.html"


def _depends(spec: Validate, device: str) -> Mapping[str, str]:
    """The evaluation text, and the machine: a latency is never reused on another."""
    facts = environment_facts(torch.device(device))
    machine = {name: facts.get(name) for name in ("device_key", "device", "threads", "driver")}
    stated = {} if spec.speculative is None else spec.speculative.data
    prompts = {f"prompts {category}": identity(load_card(card)) for category, card in stated.items()}
    return {**data_identity(spec, device), **prompts, "machine": digest_json(machine)}


@STAGES.stage(
    "validate",
    version=3,
    takes=(Port.SOURCE, (Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)),
    uses=(Port.CALIB, Port.QUANTIZED, Port.DENSE, Port.DRAFT),
    gives=Port.EVIDENCE,
    spec=Validate,
    estimate=estimate,
    depends=_depends,
)
def validate(spec: Validate, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    report = prove(spec, inputs, ctx)
    write_atomic(out.path / REPORT_JSON, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(out.path / REPORT_HTML, render_html(report).encode())
    k = (spec.speculative or Speculation()).k
    card = render_markdown_card(
        report,
        base_model=inputs.source.name,
        license_id=license_of(inputs),
        serve_command=serve_command(report["artifact"].get("kv_cache"), method=draft_method(inputs), k=k),
        eval_command=f"compress validate <this directory> --against {inputs.source.name} --data {spec.data}",
    )
    write_atomic(out.path / MODEL_CARD, card.encode())
    facts = {"verdict": report["verdict"], "gates": report.get("gates", [])}
    out.describe(role="evidence", facts=facts | ({"warnings": report["warnings"]} if "warnings" in report else {}))


def prove(spec: Validate, inputs: Inputs, ctx: Context) -> dict[str, Any]:
    """Measure everything and return the report document.

    Raises:
        UsageError: the models do not share a vocabulary, a sequence is longer than the model, or logits are not finite.
    """
    device = torch.device(ctx.device)
    _, candidate_input = inputs.first(Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)
    paths = {"source": inputs.source.path, **_dense_path(inputs), "candidate": candidate_input.path}
    proposers = proposers_of(spec.speculative, inputs)
    num_steps = 2 + (len(paths) if spec.latency is not None else 0) + bool(proposers)
    steps = count()
    ctx.boundary(next(steps), num_steps, f"loading {len(paths)} models")
    config = spec.engine_config(speculates=bool(proposers))
    weights = {side: open_weights(path) for side, path in paths.items()}
    engines = {
        side: Engine(each, device=device, config=replace(config, kv_format=spec.kv_format if side == "candidate" else None))
        for side, each in weights.items()
    }
    source, candidate = engines["source"], engines["candidate"]
    if source.arch.vocab_size != candidate.arch.vocab_size:
        raise UsageError(
            f"the source {inputs.source.name} has {source.arch.vocab_size} tokens and the artifact {candidate.arch.vocab_size}: "
            "it was not made from this model. Name its own source."
        )
    tokens, data_facts = read_tokens(
        inputs.source, spec.data, num_samples=spec.num_samples, seq_len=spec.seq_len, seed=None, offline=ctx.offline
    )

    ctx.boundary(next(steps), num_steps, f"accuracy on {spec.num_samples} x {spec.seq_len} tokens")
    accuracy = _accuracy(engines, tokens, spec.windows_at_once(source.arch), device)
    rows: dict[str, list[LatencyRow]] = {}
    roofs: list[RooflineRow] = []
    if spec.latency is not None:
        bandwidth = measure_bandwidth(device)
        for side, engine in engines.items():
            ctx.boundary(next(steps), num_steps, f"latency of the {side}")
            rows[side] = time_engine(engine, spec.latency.of(side), ctx.seed, bandwidth)
        roofs = roofs_of(candidate, rows["candidate"], bandwidth, measure_matmul_rate(device, candidate.dtype))
    del engines, source  # room for engines that speculate
    speculation, conditions = None, None
    if proposers:
        step = next(steps), num_steps
        speculation, conditions = speculate(spec, inputs, weights["candidate"], candidate, proposers, ctx, step=step)
    ctx.progress.update(num_steps, num_steps, "done")

    sizes, draft = sizes_of(paths["source"], paths["candidate"]), draft_path(inputs)
    draft_bytes = None if draft is None else size_of(draft)
    manifest = open_artifact(candidate_input.path).manifest
    kv_cache = served_cache(manifest, candidate)
    made = dense_facts(inputs)
    scheme = None if manifest.scheme is None else ModelScheme.from_json(manifest.scheme)
    journey = Journey(
        made=made,
        quantized=scheme is not None,
        sizes={side: size_of(path) for side, path in paths.items()},
        draft_bytes=draft_bytes,
        accuracy=accuracy,
        latency=rows,
        speculation=speculation,
    )
    return build_report(
        title=f"{inputs.source.name}{', pruned,' if 'pruning' in made else ''} in {'dense weights' if scheme is None else scheme.name}",
        artifact={
            "digest": candidate_input.digest,
            "source": inputs.source.name,
            "source_revision": inputs.source.revision,
            "source_digest": inputs.source.digest,
            "scheme": None if scheme is None else scheme.name,
            "exceptions": exceptions_of(scheme),
            "format": manifest.facts.get("format"),
            **({"kv_cache": kv_cache["format"]} if kv_cache is not None else {}),
            "sizes": sizes,
            **({"draft_bytes": draft_bytes} if draft_bytes is not None else {}),
        },
        layers=layer_rows(inputs, scheme),
        guided=quantization(inputs).get("guided", False),
        tuning=quantization(inputs).get("tuning"),
        mixed=quantization(inputs).get("mixed"),
        **made,
        stages=journey.rows(),
        accuracy=accuracy["source", "candidate"],
        latency_source=rows.get("source", ()),
        latency_candidate=rows.get("candidate", ()),
        kernels=candidate.kernel_report(),
        roofline=roofs,
        speculation=None if speculation is None else {**(conditions or {}), **speculation.as_json(), "draft": draft_facts(inputs)},
        gates=_gates(spec, Port.QUANTIZED in inputs.ports, accuracy, rows.get("candidate", []), sizes, speculation, device),
        calibration=calibration_facts(inputs, tokens, data_facts),
        environment=environment_facts(device),
        kv_cache=kv_cache,
    )


def _dense_path(inputs: Inputs) -> dict[str, Path]:
    """The weights that were quantized, where they are another model than the source."""
    dense = inputs.ports.get(Port.DENSE)
    if dense is None or Port.QUANTIZED not in inputs.ports or dense.digest == inputs.source.digest:
        return {}
    return {"dense": dense.path}


def _accuracy(engines: Mapping[str, Engine], tokens: TokenSet, batch_size: int, device: torch.device) -> dict[tuple[str, str], Accuracy]:
    """Of the candidate against the source; and, where there is one between them, of that against the source and of the candidate against
    that."""
    sides = list(engines)
    pairs = [("source", "candidate"), *([("source", "dense"), ("dense", "candidate")] if "dense" in engines else [])]
    with torch.inference_mode():
        measured = measure_pairs(
            [engine.runner.score for engine in engines.values()],
            [(sides.index(before), sides.index(after)) for before, after in pairs],
            tokens.tokens_NS.to(device),
            num_bytes=tokens.num_scored_bytes,
            batch_size=batch_size,
        )
    return dict(zip(pairs, measured, strict=True))


def _gates(
    spec: Validate,
    quantized: bool,
    accuracy: Mapping[tuple[str, str], Accuracy],
    latency: list[LatencyRow],
    sizes: list[dict[str, Any]],
    speculation: SpeculationEvidence | None,
    device: torch.device,
) -> list[GateResult]:
    """Latency gates look at the first batch size, those of the size at the model without its draft. `quantized`: the recipe has quantized,
    and what it quantized is the source unless it was measured too."""
    total = {side: sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")}
    whole = accuracy["source", "candidate"]
    metrics = whole.metrics() | {"size_ratio": stats.Estimate.exact(total["candidate"] / total["source"])}
    if quantized:
        alone = accuracy.get(("dense", "candidate"), whole).metrics()
        metrics |= {f"{QUANTIZE}.{name}": value for name, value in alone.items()}
    if latency:
        metrics |= latency[0].metrics()
    if speculation is not None:
        metrics |= speculation.metrics
    return evaluate(read_gates(spec.gates), metrics, device=device_key(device))
