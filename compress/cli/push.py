"""`compress push`: an artifact, with its evidence if given, into a registry."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text
from compress.errors import UsageError


def push(
    artifact: Annotated[Path, typer.Argument(help="Directory of the artifact.")],
    ref: Annotated[str, typer.Argument(help="Where to, such as layout://registry/my-model:candidate; the tag becomes an alias.")],
    alias: Annotated[list[str] | None, typer.Option("--alias", help="One more tag; may be repeated.")] = None,
    evidence: Annotated[
        Path | None, typer.Option("--evidence", help="Directory of report.json, provenance.json, README.md and plots.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Store an artifact in a registry; only the last step, moving the tags, is visible."""
    from compress.artifact.manifest import open_artifact
    from compress.registry.protocol import open_registry
    from compress.registry.ref import parse_ref
    from compress.registry.transfer import push as push_artifact

    target = parse_ref(ref)
    if target.digest:
        raise UsageError(f"'{ref}' names a digest; a push gives a name: write {target.registry}/{target.name}:tag.")
    opened = open_artifact(artifact)
    result = push_artifact(
        open_registry(target.registry), opened, name=target.name, aliases=(target.tag, *(alias or ())), evidence=evidence
    )
    pinned = str(target.pinned(result.manifest_digest))
    new = count_text(result.num_new_blobs, "new blob") if result.num_new_blobs else "all blobs were there already"
    text = f"{pinned}\ntags {', '.join(result.tags)}; {size_text(result.size_bytes)}; {new}"
    emit({"ref": pinned, **asdict(result)}, text, as_json=as_json)
