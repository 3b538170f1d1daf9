"""The report of a model that was quantized by tensor name: accuracy through transformers, and no latency,
because the bundled runtime does not run it."""

from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.machine import device_key, environment_facts
from compress.models.config_file import read_config
from compress.models.named_linears import stated_vocab_size
from compress.stages import Input, Inputs
from compress.stages.validate.candidate import candidate_facts
from compress.stages.validate.estimate import check_gates_by_name
from compress.stages.validate.evidence import artifact_facts, calibration_facts, sizes_of
from compress.stages.validate.spec import QUANTIZE, Validate, read_gates
from compress.validate import stats
from compress.validate.accuracy import Accuracy, measure_pairs
from compress.validate.gates import GateResult, evaluate
from compress.validate.parts import Part
from compress.validate.parts.accuracy import AccuracyPart
from compress.validate.parts.artifact import ArtifactPart, totals
from compress.validate.parts.by_name import ByNamePart
from compress.validate.parts.gates import GatesPart
from compress.validate.parts.provenance import ProvenancePart
from compress.validate.report import build_report
from compress.validate.transformers_model import TransformersModel, check_causal, transformers_version


def is_by_name(path: Path) -> bool:
    """Return whether the artifact in a directory was quantized by tensor name."""
    return (path / MANIFEST_NAME).exists() and "by_name" in open_artifact(path).manifest.facts


def prove_by_name(spec: Validate, inputs: Inputs, candidate: Input, ctx: Context) -> dict[str, Any]:
    """Measure source and candidate through transformers and return the report document.

    Raises:
        UsageError: transformers does not run one of them as a causal language model, or a gate limits what is
        not
            measured there.
    """
    check_gates_by_name(spec)
    config = read_config(inputs.source.path)
    check_causal(config)
    device = torch.device(ctx.device)
    manifest = open_artifact(candidate.path).manifest
    stated = candidate_facts(candidate.path)
    assert stated.scheme is not None, "the stage that quantizes by name states its scheme"
    tokens, data_facts = read_tokens(
        inputs.source,
        spec.data,
        num_samples=spec.num_samples,
        seq_len=spec.seq_len,
        seed=None,
        offline=ctx.offline,
    )
    ctx.boundary(0, 2, "loading 2 models through transformers")
    methods = {inputs.source.path: None, candidate.path: _quant_method(candidate.path)}
    models = [TransformersModel(path, method, device=device) for path, method in methods.items()]
    ctx.boundary(1, 2, f"accuracy on {spec.num_samples} x {spec.seq_len} tokens")
    batch_size = spec.windows_of(stated_vocab_size(config) or 1)
    accuracy = measure_pairs(
        [model.score for model in models],
        ((0, 1),),
        tokens.tokens_NS.to(device),
        num_bytes=tokens.num_scored_bytes,
        batch_size=batch_size,
    )[0]
    ctx.progress.update(2, 2, "done")
    sizes = sizes_of(inputs.source.path, candidate.path)
    parts: list[Part] = [
        GatesPart(_gates(spec, accuracy, sizes, device)),
        AccuracyPart(accuracy),
        ByNamePart(manifest.facts["by_name"], transformers_version()),
        ArtifactPart(artifact_facts(inputs, candidate, stated, sizes, None, None)),
        ProvenancePart(
            calibration=calibration_facts(inputs, tokens, data_facts), environment=environment_facts(device)
        ),
    ]
    return build_report(title=f"{inputs.source.name} in {stated.scheme.name}, by tensor name", parts=parts)


def _gates(
    spec: Validate, accuracy: Accuracy, sizes: list[dict[str, Any]], device: torch.device
) -> list[GateResult]:
    total = totals({"artifact": {"sizes": sizes}})
    assert total is not None, "both have tensors"
    metrics = accuracy.metrics()
    metrics |= {f"{QUANTIZE}.{name}": value for name, value in metrics.items()}
    metrics["size_ratio"] = stats.Estimate.exact(total["candidate"] / total["source"])
    return evaluate(read_gates(spec.gates), metrics, device=device_key(device))


def _quant_method(path: Path) -> str | None:
    """Return the `quant_method` that a checkpoint's config names."""
    stated = read_config(path).get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    return method if isinstance(method, str) else None
