"""The proof of a model that exists already, outside of a recipe: evidence as the stage `validate` writes it,
in a directory of its own, sealed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact.atomic import sync_tree
from compress.artifact.leftovers import neighbour
from compress.artifact.writer import ArtifactWriter
from compress.context import Context, Progress
from compress.data.model_tokens import read_tokens
from compress.errors import UsageError
from compress.pipeline.evidence import REPORT_NAME, read_report
from compress.registry.evidence import check_evidence, seal_evidence
from compress.registry.model_source import ModelSource
from compress.stages import Input, Inputs, Port
from compress.stages.validate import validate
from compress.stages.validate.candidate import check_tokenizer
from compress.stages.validate.spec import Validate
from compress.untrusted.fields import Fields


@dataclass(frozen=True)
class Proof:
    """The source that candidates are compared with, the conditions, and the device."""

    source: ModelSource
    spec: Validate
    device: str
    offline: bool = False


def check_new_directory(out: Path) -> None:
    """Raise UsageError where evidence cannot become the directory `out`: it has no name, or is there."""
    if out.name in ("", ".."):
        raise UsageError(f"{out} is not the name of a new directory; name one with --out, such as ./proof.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; name a new directory with --out.")


def write_proof(proof: Proof, candidate: Input, out: Path, progress: Progress) -> Mapping[str, Any]:
    """Measure a candidate, write the evidence to the new directory `out`, and return its verdict, gates and
    warnings.

    Raises:
        UsageError: the candidate was not made from the source, a gate is on what is not measured, or `out`
            is there already.
        UnsupportedArch, UnsupportedFormat: a model is not understood wholly.
    """
    check_new_directory(out)
    check_tokenizer(proof.source.path, candidate.path)
    source = Input(proof.source.path, proof.source.digest)
    inputs = Inputs(proof.source, {Port.SOURCE: source, Port.CHECKPOINT: candidate})
    with neighbour(out, "validating") as building:
        writer = ArtifactWriter(building)
        context = Context(proof.device, 0, building, progress, offline=proof.offline)
        validate(proof.spec, inputs, writer, context)
        seal_evidence(building)
        sync_tree(building)
        os.rename(building, out)
    assert writer.description is not None
    return dict(writer.description["facts"])


def check_found(out: Path, proof: Proof, candidate: Input) -> Any:
    """Return the report in `out`, evidence that is what `write_proof` would measure there now.

    Raises:
        UsageError: there is no evidence, or it is of another model or was measured under other conditions.
        StorageError: it was changed since it was written, or cannot be read.
    """
    if not (out / REPORT_NAME).is_file():
        raise UsageError(f"{out} exists and has no evidence; name another directory with --proofs.")
    check_evidence(out)
    report = read_report(out / REPORT_NAME)
    fields = Fields(report, f"the report in {out}", UsageError)
    if fields.fields("artifact").text("digest") != candidate.digest:
        raise UsageError(
            f"{out} has the evidence of another model than {candidate.path} is now; remove it, or name "
            "another directory with --proofs."
        )
    if (difference := _difference(fields, proof)) is not None:
        raise UsageError(
            f"{out} has evidence that was measured under other conditions than those asked for now "
            f"({difference}); remove it, or name another directory with --proofs."
        )
    return report


def _difference(report: Fields, proof: Proof) -> str | None:
    """Return the first condition of a report that is not the one of `proof`, in words; None without any."""
    spec = proof.spec
    artifact, accuracy = (report.fields(name) for name in ("artifact", "accuracy"))
    if artifact.text("source_digest") != proof.source.digest:
        return f"its source {artifact.text('source')} is another model than {proof.source.name}"
    windows, size = (accuracy.integer(name, 0, 1 << 60) for name in ("num_windows", "window_size"))
    if (windows, size) != (spec.num_samples, spec.seq_len):
        return f"{windows} windows of {size} tokens, not {spec.num_samples} of {spec.seq_len}"
    sizes = {"num_samples": spec.num_samples, "seq_len": spec.seq_len}
    tokens, _ = read_tokens(proof.source, spec.data, **sizes, seed=None, offline=proof.offline)
    if report.fields("calibration").text("evaluation_digest") != tokens.digest():
        return f"its evaluation text is not that of {spec.data}"
    if spec.latency is not None and not (report.has("latency") or report.has("by_name")):
        return "its latency was not measured; --no-latency compares without"
    return None
