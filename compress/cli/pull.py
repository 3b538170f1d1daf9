"""`compress pull`: an artifact out of a registry into a new directory, every byte checked."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, emit, progress, size_text


def pull(
    ref: Annotated[
        str,
        typer.Argument(
            help="What, such as oci://host/path/my-model:candidate, ...my-model@sha256:<hex> or "
            "models:/my-model@alias."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="Also copy the newest evidence, into this new directory."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy an artifact from a registry into a new directory; it appears only when every digest matched."""
    from compress.registry.transfer import pull as pull_artifact
    from compress.registry.transfer import resolve

    pinned = resolve(ref)  # one object, even when the tag moves meanwhile
    with progress("pull") as report:
        artifact = pull_artifact(pinned, destination, evidence=evidence, progress=report)
    document = {
        "ref": str(pinned),
        "path": str(destination),
        "artifact_digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
    }
    text = f"{destination}\n{pinned}; {size_text(artifact.size_bytes)}"
    emit({**document, "evidence": str(evidence) if evidence else None}, text, as_json=as_json)
