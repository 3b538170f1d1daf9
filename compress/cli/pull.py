"""`compress pull`: an artifact out of a registry into a new directory, every byte checked."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.output import JsonFlag, emit, progress, size_text
from compress.cli.sign import TrustConfigOption
from compress.cli.verify import IdentityOption, IssuerOption, KeyOption


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
    key: KeyOption = None,
    identity: IdentityOption = None,
    issuer: IssuerOption = None,
    trust_config: TrustConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy an artifact from a registry into a new directory, and its signature next to it; both appear only
    when every digest matched, and the signature where a key or an identity is given.
    """
    from compress.registry.stored import resolve
    from compress.registry.transfer import pull as pull_artifact
    from compress.sign.choice import verifier_of
    from compress.sign.signature import signature_path

    verifier = verifier_of(key=key, identity=identity, issuer=issuer, trust_config=trust_config)
    pinned = resolve(ref)  # one object, even when the tag moves meanwhile
    with progress("pull") as report:
        artifact = pull_artifact(pinned, destination, evidence=evidence, verifier=verifier, progress=report)
    document = {
        "ref": str(pinned),
        "path": str(destination),
        "artifact_digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
    }
    place = signature_path(destination)
    document["signature"] = str(place) if place.is_file() else None
    document["signed_by"] = None if verifier is None else str(verifier)
    signed = "" if verifier is None else f"; signed by {verifier}"
    text = f"{destination}\n{pinned}; {size_text(artifact.size_bytes)}{signed}"
    emit({**document, "evidence": str(evidence) if evidence else None}, text, as_json=as_json)
