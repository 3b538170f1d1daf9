"""`compress verify`: compare every byte with the digests, in a directory or in a registry."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text


def verify(
    target: Annotated[str, typer.Argument(help="Directory of an artifact, or a registry reference.")],
    as_json: JsonFlag = False,
) -> None:
    """Read an artifact again and compare every byte with its digests; exit code 5 when one differs."""
    if "://" in target or target.startswith("models:/"):
        from compress.registry.transfer import verify as verify_ref

        report = verify_ref(target)
        document = {**asdict(report), "ref": str(report.ref)}
        proof = (
            f" with {count_text(len(report.evidence_digests), 'piece')} of evidence"
            if report.evidence_digests
            else ""
        )
        counted = f"{count_text(report.num_blobs, 'blob')}{proof}, {size_text(report.size_bytes)}"
        text = f"{target}: whole, {counted}\n{report.artifact_digest}"
        emit({"whole": True, **document}, text, as_json=as_json)
        return
    from compress.artifact.manifest import open_artifact, verify_artifact

    artifact = open_artifact(Path(target))
    verify_artifact(artifact)
    num_files = len(artifact.manifest.files)
    counts = {"num_files": num_files, "size_bytes": artifact.size_bytes}
    counted = f"{count_text(num_files, 'file')}, {size_text(artifact.size_bytes)}"
    text = f"{target}: whole, {counted}\n{artifact.digest}"
    emit({"whole": True, "path": target, "artifact_digest": artifact.digest, **counts}, text, as_json=as_json)
