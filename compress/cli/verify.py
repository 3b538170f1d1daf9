"""`compress verify`: compare every byte with the digests, in a directory or in a registry, and the signature
with who must have made it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text
from compress.cli.sign import SignatureOption, TrustConfigOption

if TYPE_CHECKING:
    from compress.sign.signature import Verifier

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key", help="It must be signed with the private half of this public key.", show_default=False
    ),
]
IdentityOption = Annotated[
    str | None,
    typer.Option("--identity", help="It must be signed by this identity, keyless.", show_default=False),
]
IssuerOption = Annotated[
    str | None,
    typer.Option("--issuer", help="URL of the issuer that vouches for --identity.", show_default=False),
]


def verify(
    target: Annotated[str, typer.Argument(help="Directory of an artifact, or a registry reference.")],
    key: KeyOption = None,
    identity: IdentityOption = None,
    issuer: IssuerOption = None,
    trust_config: TrustConfigOption = None,
    signature: SignatureOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Read an artifact again and compare every byte with its digests, and with its signature where a key or
    an identity is given; exit code 5 when one differs, or the signature is missing or somebody else's.
    """
    from compress.errors import UsageError
    from compress.registry.ref import is_ref
    from compress.sign.choice import verifier_of

    verifier = verifier_of(key=key, identity=identity, issuer=issuer, trust_config=trust_config)
    if signature is not None and (verifier is None or is_ref(target)):
        raise UsageError("--signature names the signature of a directory, and needs --key or --identity.")
    if is_ref(target):
        _verify_ref(target, verifier, as_json=as_json)
    else:
        _verify_directory(Path(target), verifier, signature, as_json=as_json)


def _verify_ref(target: str, verifier: "Verifier | None", *, as_json: bool) -> None:
    from compress.registry.transfer import verify as verify_ref

    report = verify_ref(target, verifier=verifier)
    document = {**asdict(report), "ref": str(report.ref)}
    parts = [count_text(report.num_blobs, "blob")]
    if report.evidence_digests:
        parts[0] += f" with {count_text(len(report.evidence_digests), 'piece')} of evidence"
    parts.append(size_text(report.size_bytes))
    text = f"{target}: whole, {', '.join(parts)}{_signed(verifier)}\n{report.artifact_digest}"
    emit({"whole": True, **document}, text, as_json=as_json)


def _verify_directory(
    path: Path, verifier: "Verifier | None", signature: Path | None, *, as_json: bool
) -> None:
    from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
    from compress.sign.signature import check_directory

    if verifier is not None:
        bundle = check_directory(path, verifier, signature=signature)
        if MANIFEST_NAME not in bundle.files:  # a model of another tool has no digest of its own
            facts = {"path": str(path), "num_files": len(bundle.files), "signed_by": str(verifier)}
            text = f"{path}: {count_text(len(bundle.files), 'file')}{_signed(verifier)}"
            emit({"whole": True, **facts}, text, as_json=as_json)
            return
    artifact = open_artifact(path)
    if verifier is None:
        verify_artifact(artifact)
    num_files = len(artifact.manifest.files)
    counts = {"num_files": num_files, "size_bytes": artifact.size_bytes}
    counted = f"{count_text(num_files, 'file')}, {size_text(artifact.size_bytes)}"
    text = f"{path}: whole, {counted}{_signed(verifier)}\n{artifact.digest}"
    signed = None if verifier is None else str(verifier)
    document = {"whole": True, "path": str(path), "artifact_digest": artifact.digest, **counts}
    emit({**document, "signed_by": signed}, text, as_json=as_json)


def _signed(verifier: "Verifier | None") -> str:
    return "" if verifier is None else f", signed by {verifier}"
