"""Signatures in a registry: small manifests that refer to what is signed, as evidence does, each with one
bundle. A signature names every file by its digest, as the manifest does, so that no weights are read to check
it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compress.artifact.manifest import MANIFEST_NAME, Artifact
from compress.digest import digest_bytes
from compress.errors import SignatureRefused, StorageError
from compress.registry.blobs import read_blob
from compress.registry.image import ARTIFACT, EMPTY_CONFIG, SIGNATURE, Descriptor, ImageManifest
from compress.registry.protocol import Registry
from compress.sign.bundle import BUNDLE_TYPE, MAX_BUNDLE_BYTES, Bundle, parse_bundle, read_bundle
from compress.sign.signature import Verifier, check_bundle, check_files, signature_path

TITLE = "model.sig"
_EMPTY = Descriptor(EMPTY_CONFIG, digest_bytes(b"{}"), 2)
_MAX_TRIED = 32
"""Signatures of one artifact that are tried, newest first."""


class Signatures(Protocol):
    """The signatures that are pushed."""

    def of_artifact(self, artifact: Artifact) -> Bundle | None:
        """Return the signature of an artifact; None where it is pushed without one."""
        ...

    def of_evidence(self, directory: Path, files: Mapping[str, str]) -> Bundle | None:
        """Return the signature of a directory of evidence with these files (path -> digest), or None."""
        ...


@dataclass(frozen=True)
class KeptSignatures:
    """The signatures that are kept next to the directories, where there are any.

    Raises:
        SignatureRefused: from both methods, where one is of other files.
    """

    def of_artifact(self, artifact: Artifact) -> Bundle | None:
        return self.of_evidence(artifact.path, files_of_artifact(artifact))

    def of_evidence(self, directory: Path, files: Mapping[str, str]) -> Bundle | None:
        place = signature_path(directory)
        if not place.is_file():
            return None
        bundle = read_bundle(place)
        try:
            check_files(bundle, files, where=str(directory))
        except SignatureRefused as error:
            raise SignatureRefused(
                f"{place} is not the signature of {directory} as it is now: {error.message}",
                where=place,
                hint="Sign it again with `compress sign`, or remove that file.",
            ) from None
        return bundle


KEPT = KeptSignatures()


def files_of_artifact(artifact: Artifact) -> dict[str, str]:
    """Return the digest of each file that a signature of an artifact names, by path."""
    files = {each.path: each.digest for each in artifact.manifest.files}
    return {**files, MANIFEST_NAME: artifact.digest}


def files_of_image(image: ImageManifest) -> dict[str, str]:
    """Return the digest of each file of an artifact or of evidence in a registry, by path; the manifest of an
    artifact is among them.
    """
    files = {str(layer.title): layer.digest for layer in image.layers}
    return {**files, MANIFEST_NAME: image.config.digest} if image.artifact_type == ARTIFACT else files


def store_signature(registry: Registry, bundle: Bundle, subject: Descriptor) -> tuple[Descriptor, int]:
    """Store a bundle as the newest signature of a manifest, and return its own manifest and how many blobs
    were new.
    """
    layer = Descriptor(BUNDLE_TYPE, digest_bytes(bundle.data), len(bundle.data), TITLE)
    image = ImageManifest(SIGNATURE, _EMPTY, (layer,), subject=subject)
    num_new = 0
    for blob, source in ((layer, bundle.data), (_EMPTY, b"{}"), (image.descriptor, image.to_bytes())):
        if not registry.has(blob):
            registry.put(blob, source)
            num_new += 1
    registry.attach(image.descriptor, subject)
    return image.descriptor, num_new


def signature_manifests(registry: Registry, subject: Descriptor) -> list[Descriptor]:
    """Return the manifests of the signatures of a manifest, newest first."""
    return [each for each in reversed(registry.attached(subject)) if each.artifact_type == SIGNATURE]


def read_signature(
    registry: Registry, manifest: Descriptor, subject: Descriptor
) -> tuple[ImageManifest, Bundle]:
    """Return the manifest of a signature and its bundle.

    Raises:
        StorageError: it is damaged, or refers to another manifest.
    """
    where = f"the signature {manifest.digest}"
    image = ImageManifest.from_bytes(read_blob(registry, manifest), where)
    if image.subject is None or image.subject.digest != subject.digest or len(image.layers) != 1:
        raise StorageError(f"{where} is attached to {subject.digest} and is none of it; push it again.")
    if image.layers[0].size_bytes > MAX_BUNDLE_BYTES:
        raise StorageError(f"{where} claims {image.layers[0].size_bytes} bytes, too many for a signature.")
    return image, parse_bundle(read_blob(registry, image.layers[0]), where)


def newest_signature(registry: Registry, subject: Descriptor) -> Bundle | None:
    """Return the newest signature of a manifest, unchecked; None where it has none."""
    found = signature_manifests(registry, subject)
    return read_signature(registry, found[0], subject)[1] if found else None


def check_signed(
    registry: Registry, image: ImageManifest, subject: Descriptor, verifier: Verifier, *, where: str
) -> Bundle:
    """Check that a pushed artifact, or its evidence, is signed by whom it must be, and return that signature.
    Of several the newest one that holds counts.

    Raises:
        SignatureRefused: it has none, or none of them holds; the error is that of the newest.
    """
    found = signature_manifests(registry, subject)
    if not found:
        raise SignatureRefused(
            f"{where} is not signed.",
            where=where,
            hint="Sign it with `compress sign` and push it again.",
        )
    reason: SignatureRefused | None = None
    for manifest in found[:_MAX_TRIED]:
        try:
            bundle = read_signature(registry, manifest, subject)[1]
            check_bundle(bundle, files_of_image(image), verifier, where=where)
            return bundle
        except SignatureRefused as error:
            reason = reason or error
    assert reason is not None
    raise reason


def check_place(destination: Path, files: Mapping[str, str]) -> None:
    """Check that a pulled signature may be written next to a destination: nothing lies there, or a signature
    of the same files, such as one that a killed pull left.

    Raises:
        SignatureRefused: something else lies there.
    """
    place = signature_path(destination)
    if not os.path.lexists(place):
        return
    try:
        check_files(read_bundle(place), files, where=str(destination))
    except SignatureRefused as error:
        raise SignatureRefused(
            f"{place} is no signature of what would be pulled: {error.message}",
            where=place,
            hint="Remove it, or name another destination.",
        ) from None
