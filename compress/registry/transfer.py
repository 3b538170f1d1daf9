"""Transfer of artifacts and their evidence to and from a registry: every byte is checked and only the last
step is visible.

Push stores blobs, then manifests, then tags: killed anywhere, the tags still name what they named before.
Pull writes next to the destination, checks each blob against its digest while copying, and renames at the
end: killed or failed anywhere, there is no destination.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.artifact.atomic import sync_directory, sync_tree, write_atomic
from compress.artifact.disk import explained
from compress.artifact.leftovers import neighbour
from compress.artifact.manifest import (
    MANIFEST_NAME,
    Artifact,
    FileRecord,
    file_names,
    open_artifact,
)
from compress.context import Progress, SilentProgress
from compress.digest import digest_bytes, digest_file
from compress.errors import StorageError, UsageError
from compress.registry.blobs import copy_blob, fetch_files, store_image
from compress.registry.evidence import check_evidence
from compress.registry.image import (
    ARTIFACT,
    ARTIFACT_CONFIG,
    EMPTY_CONFIG,
    EVIDENCE,
    Descriptor,
    ImageManifest,
    file_layers,
)
from compress.registry.protocol import Committing, Registry
from compress.registry.ref import DEFAULT_TAG, Ref, check_name, check_tag
from compress.registry.signatures import (
    KEPT,
    Signatures,
    check_place,
    check_signed,
    files_of_image,
    newest_signature,
    read_signature,
    signature_manifests,
    store_signature,
)
from compress.registry.stored import (
    as_ref,
    evidence_of,
    find,
    newest_evidence,
    open_repository,
    read_artifact,
    read_evidence,
)
from compress.sign.bundle import Bundle
from compress.sign.signature import Signer, Verifier, check_files, make_bundle, signature_path
from compress.untrusted.text import one_line

SILENT = SilentProgress()
_ELSEWHERE = "Free space there, or give another destination."


@dataclass(frozen=True)
class PushResult:
    """The outcome of a push: what became visible; `num_new_blobs` is 0 when all of it was there already,
    `revision` is the commit that has it, where the registry makes commits, and `signature_digest` that of the
    manifest of its signature, where it is signed.
    """

    name: str
    tags: tuple[str, ...]
    manifest_digest: str
    artifact_digest: str
    evidence_digest: str | None
    size_bytes: int
    num_new_blobs: int
    revision: str | None = None
    signature_digest: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The objects that `verify` read and found whole; `signed_by` is who signed it, where that was asked."""

    ref: Ref
    manifest_digest: str
    artifact_digest: str
    evidence_digests: tuple[str, ...]
    signature_digests: tuple[str, ...]
    signed_by: str | None
    num_blobs: int
    size_bytes: int


def push(
    registry: Registry,
    artifact: Artifact,
    *,
    name: str,
    aliases: Sequence[str] = (),
    evidence: Path | None = None,
    sign: Signatures = KEPT,
    move: Callable[[tuple[str, ...], Descriptor], None] | None = None,
    progress: Progress = SILENT,
) -> PushResult:
    """Store an artifact, a directory of evidence that refers to it, and the signatures of both,
    then move `latest` and the aliases to it in one step, with `move` where it is given.
    `sign` returns the signatures, by default those that are kept next to the directories.

    Raises:
        UsageError: a bad name or alias, or an evidence directory that is missing, empty or itself an
            artifact.
        SignatureRefused: the signature of one of them is of other files.
        StorageError: a file does not match the manifest or the seal of the evidence, or the registry cannot
            be written.
    """
    check_name(name)
    tags = tuple(dict.fromkeys(check_tag(tag) for tag in (DEFAULT_TAG, *aliases)))
    proof = _evidence_files(evidence) if evidence is not None else ()
    signature = sign.of_artifact(artifact)
    proof_signature = None if evidence is None else sign.of_evidence(evidence, _digests_of(proof))
    config = artifact.manifest.to_bytes()
    image = ImageManifest(
        ARTIFACT,
        Descriptor(ARTIFACT_CONFIG, digest_bytes(config), len(config), MANIFEST_NAME),
        file_layers(artifact.manifest.files),
    )
    registry = registry.repository(name)
    num_new = store_image(registry, image, config, artifact.path, progress=progress)
    attached = None
    if evidence is not None:
        empty = Descriptor(EMPTY_CONFIG, digest_bytes(b"{}"), 2)
        attached = ImageManifest(EVIDENCE, empty, file_layers(proof), subject=image.descriptor)
        num_new += store_image(registry, attached, b"{}", evidence, progress=progress)
        registry.attach(attached.descriptor, image.descriptor)
        if proof_signature is not None:
            num_new += store_signature(registry, proof_signature, attached.descriptor)[1]
    signed = None
    if signature is not None:
        signed, num_new_here = store_signature(registry, signature, image.descriptor)
        num_new += num_new_here
    if move is None:
        registry.write_tag(name, tags, image.descriptor)
    else:
        move(tags, image.descriptor)
    return PushResult(
        name=name,
        tags=tags,
        manifest_digest=image.descriptor.digest,
        artifact_digest=artifact.digest,
        evidence_digest=attached.descriptor.digest if attached else None,
        size_bytes=artifact.size_bytes,
        num_new_blobs=num_new,
        revision=registry.revision if isinstance(registry, Committing) else None,
        signature_digest=signed.digest if signed else None,
    )


def _evidence_files(path: Path) -> tuple[FileRecord, ...]:
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        raise UsageError(
            f"{path} is not a directory of evidence (report.json, provenance.json, README.md and plots)."
        )
    check_evidence(path)
    records = tuple(
        FileRecord(name, (path / name).stat().st_size, digest_file(path / name)) for name in file_names(path)
    )
    if not records:
        raise UsageError(
            f"the evidence directory {path} is empty; validate the artifact first or push without evidence."
        )
    return records


def _digests_of(records: Sequence[FileRecord]) -> dict[str, str]:
    return {each.path: each.digest for each in records}


def attach_evidence(ref: Ref | str, evidence: Path) -> str:
    """Store a directory of evidence, with its signature, as the newest one of an artifact, and
    return the digest of its manifest.

    Raises:
        UsageError: the reference means nothing, or the directory is no evidence.
        StorageError: a file does not match the seal of the evidence, or the registry cannot be written.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    subject = find(registry, ref)
    empty = Descriptor(EMPTY_CONFIG, digest_bytes(b"{}"), 2)
    proof = _evidence_files(evidence)
    signature = KEPT.of_evidence(evidence, _digests_of(proof))
    attached = ImageManifest(EVIDENCE, empty, file_layers(proof), subject=subject)
    store_image(registry, attached, b"{}", evidence, progress=SILENT)
    registry.attach(attached.descriptor, subject)
    if signature is not None:
        store_signature(registry, signature, attached.descriptor)
    return attached.descriptor.digest


def sign_pushed(ref: Ref | str, signer: Signer) -> str:
    """Read every byte of a pushed artifact again, sign it, attach the signature as its newest one, and return
    the digest of the signature's manifest.

    Raises:
        UsageError: the reference means nothing, or there is no key.
        StorageError: a blob is missing or differs from its digest, or the registry cannot be written.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    subject = find(registry, ref)
    image, _ = read_artifact(registry, subject)
    for blob in (image.config, *image.layers):
        copy_blob(registry, blob, None)
    bundle = make_bundle(files_of_image(image), ref.name, signer)
    return store_signature(registry, bundle, subject)[0].digest


def check_pushed_signature(ref: Ref | str, verifier: Verifier) -> None:
    """Check that a pushed artifact is signed by whom it must be. Its manifests and signatures are read, and
    no weights: `pull` compares those with the manifests.

    Raises:
        UsageError: the reference means nothing.
        SignatureRefused: it is not.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    subject = find(registry, ref)
    check_signed(registry, read_artifact(registry, subject)[0], subject, verifier, where=str(ref))


def pull(
    ref: Ref | str,
    destination: Path,
    *,
    evidence: Path | None = None,
    verifier: Verifier | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Copy an artifact into a new directory, the newest evidence attached to it into another, and their
    signatures next to them, checking every byte. Nothing appears before all is whole. With `verifier` both
    must be signed by it, or nothing is fetched; without, the newest signatures come, compared with the files
    and not with who made them.

    Raises:
        UsageError: the reference means nothing, there is no evidence, or a destination exists and is not an
            empty directory.
        SignatureRefused: it is not signed by whom it must be.
        StorageError: a blob is missing or differs from its digest (the blob and the file are named); the
            destination is not made.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    subject = find(registry, ref)
    image, manifest = read_artifact(registry, subject)
    signature = _signature_of(registry, image, subject, verifier, where=str(ref))
    if evidence is not None:
        _check_apart(destination, evidence)
        found, proof = newest_evidence(registry, ref)
        whose = f"the evidence of {ref}"
        proof_signature = _signature_of(registry, proof, found, verifier, where=whose)
    with contextlib.ExitStack() as stack:
        building = stack.enter_context(_appearing(destination))
        check_place(destination, files_of_image(image))
        if evidence is not None:
            proving = stack.enter_context(_appearing(evidence))
            check_place(evidence, files_of_image(proof))
            fetch_files(registry, proof, proving, progress=progress)
            check_evidence(proving)
        fetch_files(registry, image, building, progress=progress)
        write_atomic(building / MANIFEST_NAME, manifest.to_bytes())
        if signature is not None:
            write_atomic(signature_path(destination), signature.data)
        if evidence is not None and proof_signature is not None:
            write_atomic(signature_path(evidence), proof_signature.data)
    return open_artifact(destination)


def _signature_of(
    registry: Registry, image: ImageManifest, subject: Descriptor, verifier: Verifier | None, *, where: str
) -> Bundle | None:
    """Return the signature that is pulled with an artifact; None where it has none and needs none."""
    if verifier is not None:
        return check_signed(registry, image, subject, verifier, where=where)
    bundle = newest_signature(registry, subject)
    if bundle is not None:
        check_files(bundle, files_of_image(image), where=where)
    return bundle


def pull_evidence(ref: Ref | str, destination: Path) -> Path:
    """Copy the newest evidence attached to an artifact into a new directory, checking every byte.

    Raises:
        UsageError: there is none, or as `pull`.
        StorageError: as `pull`, or the evidence is about another artifact.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    _, image = newest_evidence(registry, ref)
    with _appearing(destination) as building:
        fetch_files(registry, image, building, progress=SILENT)
        check_evidence(building)
    return destination


def verify(ref: Ref | str, *, verifier: Verifier | None = None) -> VerifyReport:
    """Read every blob of an artifact, of its evidence and of their signatures again, without copying. With
    `verifier` the artifact must be signed by it, and the newest evidence where that is signed at all.

    Raises:
        UsageError: the reference means nothing.
        SignatureRefused: it is not signed by whom it must be.
        StorageError: a blob is missing or differs from its digest; the blob and the file are named.
    """
    ref = as_ref(ref)
    registry = open_repository(ref)
    found = find(registry, ref)
    image, manifest = read_artifact(registry, found)
    attached = evidence_of(registry, found)
    evidence = [read_evidence(registry, descriptor, found) for descriptor in attached]
    if verifier is not None:
        check_signed(registry, image, found, verifier, where=str(ref))
        if attached and signature_manifests(registry, attached[-1]):
            check_signed(registry, evidence[-1], attached[-1], verifier, where=f"the evidence of {ref}")
    signed_ones = [
        (each, sign) for each in (found, *attached) for sign in signature_manifests(registry, each)
    ]
    signatures = [sign for _, sign in signed_ones]
    signed = [read_signature(registry, sign, each)[0] for each, sign in signed_ones]
    blobs = [blob for each in (image, *evidence, *signed) for blob in (each.config, *each.layers)]
    for blob in blobs:
        copy_blob(registry, blob, None)
    whole = [found, *attached, *signatures, *blobs]
    return VerifyReport(
        ref=ref,
        manifest_digest=found.digest,
        artifact_digest=manifest.digest,
        evidence_digests=tuple(descriptor.digest for descriptor in attached),
        signature_digests=tuple(descriptor.digest for descriptor in signatures),
        signed_by=None if verifier is None else str(verifier),
        num_blobs=len({blob.digest for blob in whole}),
        size_bytes=sum({blob.digest: blob.size_bytes for blob in whole}.values()),
    )


def _check_apart(one: Path, other: Path) -> None:
    """Raise UsageError where a directory is another one, or inside of it."""
    paths = one.resolve(), other.resolve()
    if paths[0].is_relative_to(paths[1]) or paths[1].is_relative_to(paths[0]):
        raise UsageError(f"{other} is not apart from {one}; name two directories beside each other.")


@contextlib.contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """Yield a temporary directory next to the destination that replaces it when the block ends well and is
    removed otherwise.
    """
    if destination.name in ("", "..") or "\0" in str(destination):
        raise UsageError(
            f"'{one_line(str(destination))}' is not the name of a new directory; name one to pull to, "
            "such as ./model."
        )
    if (
        destination.is_symlink()
        or (destination.exists() and not destination.is_dir())
        or (destination.is_dir() and any(destination.iterdir()))
    ):
        raise UsageError(f"{destination} exists and is not an empty directory; name a new one to pull to.")
    try:
        with (
            explained(destination, hint=_ELSEWHERE),
            neighbour(destination, "pulling", go_on=True) as building,
        ):
            yield building
            sync_tree(building)
            os.rename(building, destination)
            sync_directory(destination.parent)
    except OSError as error:
        raise StorageError(
            f"{destination} cannot be written: {error.strerror}.", where=destination
        ) from error
