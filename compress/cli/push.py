"""`compress push`: an artifact, with its evidence if given, into a registry."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text
from compress.errors import GateFailed, UsageError


def push(
    artifact: Annotated[Path, typer.Argument(help="Directory of the artifact.")],
    ref: Annotated[
        str,
        typer.Argument(
            help="Where to, such as layout://registry/my-model:candidate; the tag becomes an alias."
        ),
    ],
    alias: Annotated[list[str] | None, typer.Option("--alias", help="One more tag; may be repeated.")] = None,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="Directory of report.json, provenance.json, README.md and plots."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Store an artifact in a registry, unless a gate failed in its evidence; only the last step, moving the
    tags, is visible.
    """
    from compress.artifact.manifest import open_artifact
    from compress.registry.protocol import open_registry
    from compress.registry.ref import parse_ref
    from compress.registry.transfer import push as push_artifact

    target = parse_ref(ref)
    if target.digest:
        raise UsageError(
            f"'{ref}' names a digest; a push gives a name: write {target.registry}/{target.name}:tag."
        )
    opened = open_artifact(artifact)
    if evidence is not None:
        _check_evidence(evidence / "report.json", opened.digest)
    result = push_artifact(
        open_registry(target.registry),
        opened,
        name=target.name,
        aliases=(target.tag, *(alias or ())),
        evidence=evidence,
    )
    pinned = str(target.pinned(result.manifest_digest))
    new = (
        count_text(result.num_new_blobs, "new blob")
        if result.num_new_blobs
        else "all blobs were there already"
    )
    text = f"{pinned}\ntags {', '.join(result.tags)}; {size_text(result.size_bytes)}; {new}"
    emit({"ref": pinned, **asdict(result)}, text, as_json=as_json)


def _check_evidence(file: Path, digest: str) -> None:
    """Check that evidence is about this artifact and that no gate failed in it.

    Raises:
        UsageError: the report is of another artifact, or is not JSON.
        GateFailed: a gate failed.
    """
    if not file.is_file():
        return
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None
    about = report.get("artifact", {}).get("digest", digest)
    if about != digest:
        raise UsageError(
            f"{file} is about the artifact {about}, and this one is {digest}; validate this one first."
        )
    verdict = report.get("verdict", {})
    if verdict.get("passed") is False:
        raise GateFailed(
            f"not pushed: {' '.join(verdict.get('reasons', []))} The artifact is kept; {file} says by how "
            f"much."
        )
