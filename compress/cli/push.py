"""`compress push`: an artifact, with its evidence if given, into a registry."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit, progress, size_text
from compress.errors import GateFailed, UsageError
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, read_json


def push(
    artifact: Annotated[Path, typer.Argument(help="Directory of the artifact.")],
    ref: Annotated[
        str,
        typer.Argument(
            help="Where to: layout://, oci://, s3://, mlflow+https:// or hf://, such as "
            "oci://host/path/my-model:candidate; the tag becomes an alias."
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
    with progress("push") as report:
        result = push_artifact(
            open_registry(target.registry),
            opened,
            name=target.name,
            aliases=(target.tag, *(alias or ())),
            evidence=evidence,
            progress=report,
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
    if not file.exists():
        return
    try:
        report = Fields(read_json(file), str(file), UsageError)
    except Malformed as error:
        raise UsageError(f"{file} is not JSON: {error}.") from None
    about = report.fields("artifact", default={}).text("digest", default=digest)
    if about != digest:
        raise UsageError(
            f"{file} is about the artifact {about}, and this one is {digest}; validate this one first."
        )
    verdict = report.fields("verdict", default={})
    if not verdict.flag("passed", default=True):
        reasons = " ".join(verdict.texts("reasons", default=()))
        raise GateFailed(f"not pushed: {reasons} The artifact is kept; {file} says by how much.")
