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
from compress.errors import UsageError
from compress.registry.evidence import seal_evidence
from compress.registry.model_source import ModelSource
from compress.stages import Input, Inputs, Port
from compress.stages.validate import validate
from compress.stages.validate.candidate import check_tokenizer
from compress.stages.validate.spec import Validate


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
