"""`validate`: what the artifact proves about itself against the source model: accuracy, latency, gates, report.

Both models run through the bundled runtime's own path; the numbers that are gated are the numbers that would be served.

spec.py   what a recipe may say    speed.py   latency and roofline    evidence.py   all that is not measured    estimate.py   for `plan`
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.digest import digest_json
from compress.errors import UsageError
from compress.export import VLLM_KV_FLAGS, open_weights
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
    sizes_of,
)
from compress.stages.validate.spec import Validate
from compress.stages.validate.speed import roofs_of, time_engine
from compress.validate import stats
from compress.validate.accuracy import Accuracy, measure_accuracy
from compress.validate.card import render_markdown_card
from compress.validate.gates import GateResult, evaluate, parse_gates
from compress.validate.latency import LatencyRow
from compress.validate.report import build_report, render_html
from compress.validate.roofline import RooflineRow, device_key, environment_facts, measure_bandwidth, measure_matmul_rate

REPORT_JSON, REPORT_HTML = "report.json", "report.html"


def _depends(spec: Validate, device: str) -> Mapping[str, str]:
    """The evaluation text, and the machine: a latency is never reused on another."""
    facts = environment_facts(torch.device(device))
    machine = {name: facts.get(name) for name in ("device_key", "device", "threads", "driver")}
    return {**data_identity(spec, device), "machine": digest_json(machine)}


@STAGES.stage(
    "validate",
    version=2,
    takes=(Port.SOURCE, (Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)),
    uses=(Port.CALIB, Port.QUANTIZED, Port.DENSE),
    gives=Port.EVIDENCE,
    spec=Validate,
    estimate=estimate,
    depends=_depends,
)
def validate(spec: Validate, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    report = prove(spec, inputs, ctx)
    write_atomic(out.path / REPORT_JSON, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(out.path / REPORT_HTML, render_html(report).encode())
    card = render_markdown_card(
        report,
        base_model=inputs.source.name,
        license_id=license_of(inputs),
        serve_command=f"vllm serve <this directory> {VLLM_KV_FLAGS.get(report['artifact'].get('kv_cache'), '')}".rstrip(),
        eval_command=f"compress validate <this directory> --against {inputs.source.name} --data {spec.data}",
    )
    write_atomic(out.path / MODEL_CARD, card.encode())
    facts = {"verdict": report["verdict"], "gates": report.get("gates", [])}
    out.describe(role="evidence", facts=facts | ({"warnings": report["warnings"]} if "warnings" in report else {}))


def prove(spec: Validate, inputs: Inputs, ctx: Context) -> dict[str, Any]:
    """Measure everything and return the report document.

    Raises:
        UsageError: the two models do not share a vocabulary, a sequence is longer than the model, or logits are not finite.
    """
    device = torch.device(ctx.device)
    _, candidate_input = inputs.first(Port.CHECKPOINT, Port.QUANTIZED, Port.DENSE)
    num_steps = 4 if spec.latency is not None else 2
    ctx.boundary(0, num_steps, "loading both models")
    config = spec.engine_config()
    source = Engine(open_weights(inputs.source.path), device=device, config=config)
    candidate = Engine(open_weights(candidate_input.path), device=device, config=replace(config, kv_format=spec.kv_format))
    if source.arch.vocab_size != candidate.arch.vocab_size:
        raise UsageError(
            f"the source {inputs.source.name} has {source.arch.vocab_size} tokens and the artifact {candidate.arch.vocab_size}: "
            "it was not made from this model. Name its own source."
        )
    tokens, data_facts = read_tokens(
        inputs.source, spec.data, num_samples=spec.num_samples, seq_len=spec.seq_len, seed=None, offline=ctx.offline
    )

    ctx.boundary(1, num_steps, f"accuracy on {spec.num_samples} x {spec.seq_len} tokens")
    with torch.inference_mode():
        accuracy = measure_accuracy(
            source.runner.score,
            candidate.runner.score,
            tokens.tokens_NS.to(device),
            num_bytes=tokens.num_scored_bytes,
            batch_size=spec.windows_at_once(source.arch),
        )
    rows: dict[str, list[LatencyRow]] = {"source": [], "candidate": []}
    roofs: list[RooflineRow] = []
    if spec.latency is not None:
        bandwidth = measure_bandwidth(device)
        for idx, (side, engine) in enumerate((("source", source), ("candidate", candidate))):
            ctx.boundary(2 + idx, num_steps, f"latency of the {side}")
            rows[side] = time_engine(engine, spec.latency, ctx.seed, bandwidth)
        roofs = roofs_of(candidate, rows["candidate"], bandwidth, measure_matmul_rate(device, candidate.dtype))
    sizes = sizes_of(inputs.source.path, candidate_input.path)
    gates = _gates(spec, accuracy, rows["candidate"], sizes, device)
    ctx.progress.update(num_steps, num_steps, "done")
    manifest = open_artifact(candidate_input.path).manifest
    kv_cache = served_cache(manifest, candidate)
    made = dense_facts(inputs)
    scheme = None if manifest.scheme is None else ModelScheme.from_json(manifest.scheme)
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
        },
        layers=layer_rows(inputs, scheme),
        guided=quantization(inputs).get("guided", False),
        tuning=quantization(inputs).get("tuning"),
        mixed=quantization(inputs).get("mixed"),
        **made,
        accuracy=accuracy,
        latency_source=rows["source"],
        latency_candidate=rows["candidate"],
        kernels=candidate.kernel_report(),
        roofline=roofs,
        gates=gates,
        calibration=calibration_facts(inputs, tokens, data_facts),
        environment=environment_facts(device),
        kv_cache=kv_cache,
    )


def _gates(
    spec: Validate, accuracy: Accuracy, latency: list[LatencyRow], sizes: list[dict[str, Any]], device: torch.device
) -> list[GateResult]:
    """Latency gates look at the first batch size."""
    total = {side: sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")}
    metrics = accuracy.metrics() | {"size_ratio": stats.Estimate.exact(total["candidate"] / total["source"])}
    if latency:
        metrics |= latency[0].metrics()
    return evaluate(parse_gates(spec.gates), metrics, device=device_key(device))
