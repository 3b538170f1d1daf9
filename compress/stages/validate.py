"""`validate`: what the artifact proves about itself against the source model: accuracy, latency, gates, report.

Both models run through the bundled runtime's own path; the numbers that are gated are the numbers that would be served.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field

from compress.artifact.atomic import write_atomic
from compress.artifact.context import Context
from compress.artifact.header import read_header
from compress.artifact.manifest import Manifest, open_artifact
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.card import check_at_hand, load_card
from compress.calibrate.corpus import Document
from compress.calibrate.dataset import TokenSet, load_token_set, load_tokenizer, overlap
from compress.digest import digest_json
from compress.errors import UsageError, did_you_mean
from compress.export import VLLM_KV_FLAGS, open_weights
from compress.kernels.paged import DENSE_FORMATS
from compress.models.arch import Arch
from compress.quant.scheme import ModelScheme
from compress.recipe import Spec, checked_by
from compress.runtime.engine import Engine, EngineConfig
from compress.stages import STAGES, Estimate, Input, Inputs, PlanFacts, Port
from compress.stages.calibrate import TOKENS_NAME, data_identity, fits, read_tokens
from compress.validate import stats
from compress.validate.accuracy import Accuracy, measure_accuracy
from compress.validate.card import render_markdown_card
from compress.validate.gates import GateResult, evaluate, parse_gates
from compress.validate.latency import LatencyRow, measure_latency
from compress.validate.report import build_report, render_html
from compress.validate.roofline import (
    READ_BYTES,
    RooflineRow,
    Work,
    device_key,
    environment_facts,
    measure_bandwidth,
    measure_matmul_rate,
    roofline,
)

REPORT_JSON, REPORT_HTML, MODEL_CARD = "report.json", "report.html", "README.md"


KVFormat = Literal["DENSE", "FP8_STATIC", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"]


class Latency(Spec):
    """What is timed, on this machine."""

    batch_sizes: tuple[int, ...] = Field((1, 4), min_length=1)
    prompt_tokens: int = Field(128, ge=1)
    output_tokens: int = Field(32, ge=2)
    repeats: int = Field(5, ge=2)
    warmups: int = Field(1, ge=0)


class Validate(Spec):
    """Evaluation text, latency conditions, and the gates that decide."""

    against: Literal["source"] = "source"
    data: str = Field("builtin://python-eval", description="evaluation text: a data card or builtin://python-eval")
    num_samples: int = Field(32, ge=2)
    seq_len: int = Field(512, ge=8)
    kv_format: KVFormat | None = Field(
        None, description="of the candidate's KV cache; by default what the artifact states, the model's dtype where it states nothing"
    )
    latency: Latency | None = Latency()
    gates: Annotated[dict[str, float | dict[str, float]], checked_by(parse_gates)] = Field(
        default_factory=dict, description="metric -> limit, latency per device"
    )


def kv_format_named(name: str | None) -> KVFormat | None:
    """Raises UsageError: there is no KV cache of that name."""
    known = {each: each for each in get_args(KVFormat)}
    if name is not None and name not in known:
        raise UsageError(f"unknown KV cache format '{name}'.{did_you_mean(name, known)}")
    return known.get(name)


def _depends(spec: Validate, device: str) -> Mapping[str, str]:
    """The evaluation text, and the machine: a latency is never reused on another."""
    facts = environment_facts(torch.device(device))
    machine = {name: facts.get(name) for name in ("device_key", "device", "threads", "driver")}
    return {**data_identity(spec, device), "machine": digest_json(machine)}


def _estimate(spec: Validate, facts: PlanFacts) -> Estimate:
    """Two models side by side, 2 FLOPs a weight and token, and the float32 logits of both with what is computed from them."""
    arch = facts.arch
    fits(spec.seq_len, "validate: seq_len", arch)
    check_at_hand(load_card(spec.data))
    if spec.latency is not None:
        fits(spec.latency.prompt_tokens + spec.latency.output_tokens, "validate: latency prompt and output together", arch)
    width = 4 if facts.device == "cpu" else 2
    num_tokens = spec.num_samples * spec.seq_len
    logits = 4 * 4 * _windows_at_once(arch, spec.seq_len) * spec.seq_len * arch.vocab_size
    reading = READ_BYTES[facts.device] if spec.latency is not None else 0  # the buffer that measures the bandwidth
    config = _engine_config(spec)
    assert config.max_model_len is not None
    kv_bytes_per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in arch.layers) * width
    caches = 2 * config.max_batch_size * config.max_model_len * kv_bytes_per_token
    peak = 2 * arch.num_params * width + caches + max(logits, reading)
    notes = [f"{spec.num_samples} x {spec.seq_len} tokens of {spec.data}"]
    if not spec.gates:
        notes.append("no gates: nothing can fail")
    return Estimate(peak, 1_000_000, 2 * 2.0 * arch.num_params * num_tokens, notes=tuple(notes))


@STAGES.stage(
    "validate",
    version=2,
    takes=(Port.SOURCE, (Port.CHECKPOINT, Port.QUANTIZED)),
    uses=(Port.CALIB, Port.QUANTIZED),
    gives=Port.EVIDENCE,
    spec=Validate,
    estimate=_estimate,
    depends=_depends,
)
def validate(spec: Validate, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    report = prove(spec, inputs, ctx)
    write_atomic(out.path / REPORT_JSON, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(out.path / REPORT_HTML, render_html(report).encode())
    card = render_markdown_card(
        report,
        base_model=inputs.source.name,
        license_id=_license(inputs),
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
    _, candidate_input = inputs.first(Port.CHECKPOINT, Port.QUANTIZED)
    num_steps = 4 if spec.latency is not None else 2
    ctx.boundary(0, num_steps, "loading both models")
    config = _engine_config(spec)
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
            batch_size=_windows_at_once(source.arch, spec.seq_len),
        )
    rows: dict[str, list[LatencyRow]] = {"source": [], "candidate": []}
    roofs: list[RooflineRow] = []
    if spec.latency is not None:
        bandwidth = measure_bandwidth(device)
        for idx, (side, engine) in enumerate((("source", source), ("candidate", candidate))):
            ctx.boundary(2 + idx, num_steps, f"latency of the {side}")
            rows[side] = _latency(engine, spec.latency, ctx.seed, bandwidth)
        roofs = _roofline(candidate, rows["candidate"], bandwidth, measure_matmul_rate(device, candidate.dtype))
    sizes = _sizes(inputs.source.path, candidate_input)
    gates = _gates(spec, accuracy, rows["candidate"], sizes, device)
    ctx.progress.update(num_steps, num_steps, "done")
    manifest = open_artifact(candidate_input.path).manifest
    quantized = inputs.ports.get(Port.QUANTIZED)
    kv_cache = _served_cache(manifest, candidate)
    return build_report(
        title=f"{inputs.source.name} in {_scheme_name(manifest) or 'dense weights'}",
        artifact={
            "digest": candidate_input.digest,
            "source": inputs.source.name,
            "source_revision": inputs.source.revision,
            "source_digest": inputs.source.digest,
            "scheme": _scheme_name(manifest),
            "format": manifest.facts.get("format"),
            **({"kv_cache": kv_cache["format"]} if kv_cache is not None else {}),
            "sizes": sizes,
        },
        layers=open_artifact(quantized.path).manifest.facts.get("layers", []) if quantized is not None else [],
        accuracy=accuracy,
        latency_source=rows["source"],
        latency_candidate=rows["candidate"],
        kernels=candidate.kernel_report(),
        roofline=roofs,
        gates=gates,
        calibration=_calibration(inputs, tokens, data_facts),
        environment=environment_facts(device),
        kv_cache=kv_cache,
    )


def _served_cache(manifest: Manifest, engine: Engine) -> dict[str, Any] | None:
    """The candidate's KV cache if it is quantized: what its manifest says of it, if that is the one that was served."""
    if engine.kv_format in DENSE_FORMATS.values():
        return None
    stated: dict[str, Any] = manifest.facts.get("kv_cache", {})
    return {**(stated if stated.get("format") == engine.kv_format else {}), "format": engine.kv_format}


def _scheme_name(manifest: Manifest) -> str | None:
    return None if manifest.scheme is None else ModelScheme.from_json(manifest.scheme).name


def _engine_config(spec: Validate) -> EngineConfig:
    """Room for what is measured and no more: two engines share the device, and a cache for the model's full length would fill it."""
    if spec.latency is None:
        return EngineConfig(max_batch_size=1, max_model_len=spec.seq_len)
    length = max(spec.seq_len, spec.latency.prompt_tokens + spec.latency.output_tokens)
    return EngineConfig(max_batch_size=max(spec.latency.batch_sizes), max_model_len=length)


def _windows_at_once(arch: Arch, seq_len: int) -> int:
    """Windows whose float32 logits stay near half a gigabyte a side."""
    return max(1, min(8, (1 << 27) // (seq_len * arch.vocab_size)))


def _latency(engine: Engine, spec: Latency, seed: int, bandwidth: float) -> list[LatencyRow]:
    return measure_latency(
        engine,
        batch_sizes=spec.batch_sizes,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        repeats=spec.repeats,
        warmups=spec.warmups,
        vocab_size=engine.arch.vocab_size,
        seed=seed,
        bandwidth_bytes_per_s=bandwidth,
    )


def _roofline(engine: Engine, rows: list[LatencyRow], bandwidth: float, rate: float) -> list[RooflineRow]:
    work = _work(engine.arch, engine)
    return [
        each
        for row in rows
        for each in roofline(
            work,
            batch_size=row.batch_size,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ttft_ms=row.ttft_ms_p50.value,
            tpot_ms=row.tpot_ms_p50.value,
            bandwidth_bytes_per_s=bandwidth,
            flops_per_s=rate,
        )
    ]


def _work(arch: Arch, engine: Engine) -> Work:
    return Work(
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        flops_per_token=2 * arch.num_linear_params,
        head_flops=2 * arch.vocab_size * arch.hidden_size,
        attention_flops_per_pair=sum(4 * layer.num_heads * layer.head_dim for layer in arch.layers),
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


def _sizes(source: Any, candidate: Input) -> list[dict[str, Any]]:
    """Bytes on disk of both sides by kind of tensor."""
    before, after = (_bytes_by_kind(path) for path in (source, candidate.path))
    kinds = sorted(before.keys() | after.keys())
    return [{"kind": kind, "source_bytes": before.get(kind, 0), "candidate_bytes": after.get(kind, 0)} for kind in kinds]


def _bytes_by_kind(path: Any) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        for header in read_header(file):
            kind = _kind(header.name)
            kinds[kind] = kinds.get(kind, 0) + header.end - header.begin
    return kinds


def _kind(name: str) -> str:
    if "embed" in name or "head" in name:
        return "embedding and head"
    if "norm" in name:
        return "norms"
    return "attention" if "attn" in name else "ffn"


def _calibration(inputs: Inputs, evaluation: TokenSet, evaluation_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Calibration and evaluation data, and whether they share text: the windows that were really used, compared word by word."""
    facts: dict[str, Any] = {"evaluation_data": evaluation_facts["title"], "evaluation_digest": evaluation.digest()}
    if Port.CALIB not in inputs.ports:
        return facts
    calib = load_token_set(inputs[Port.CALIB].path / TOKENS_NAME)
    tokenizer, _ = load_tokenizer(inputs.source.path)
    shared = overlap(
        *([Document(str(idx), tokenizer.decode(row)) for idx, row in enumerate(each.tokens_NS.tolist())] for each in (calib, evaluation))
    )
    num_samples, seq_len = calib.tokens_NS.shape
    return facts | {
        "data": calib.source["title"],
        "license": calib.source["license"],
        "num_samples": num_samples,
        "seq_len": seq_len,
        "digest": calib.digest(),
        "overlap": f"{shared.num_shared} of {shared.num_ngrams} 13-word sequences of the evaluation text occur in the calibration text",
    }


def _license(inputs: Inputs) -> str:
    """The licence that the source's own model card states, else `other`."""
    card = inputs.source.path / MODEL_CARD
    if not card.is_file():
        return "other"
    front = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    lines = front[1].splitlines() if len(front) == 3 and not front[0].strip() else []
    stated = [line.partition(":")[2].strip() for line in lines if line.startswith("license:")]
    return stated[0] if stated and stated[0] else "other"
