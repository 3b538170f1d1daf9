"""Signatures of a model: made over the digests of all its files, kept next to its directory, and checked
before anything of the model is used.

A bundle is checked in two steps. The package model-signing checks the signature over the statement of the
bundle; then the files that the statement names are compared with those that are there: none may be changed,
missing or added. Nothing is left out of the comparison, also no file that a bundle asks to ignore.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import MANIFEST_NAME, file_names, open_artifact, verify_artifact
from compress.digest import digest_files
from compress.errors import SignatureRefused, UsageError
from compress.plugins import check_extra
from compress.sign.bundle import MAX_BUNDLE_BYTES, Bundle, parse_bundle, read_bundle
from compress.untrusted.files import read_bytes

if TYPE_CHECKING:
    from model_signing import hashing, signing, verifying

SUFFIX = ".sig"
_SERIALIZATION = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}


class Signer(Protocol):
    """A way of signing: configures the package for it."""

    def check(self) -> None:
        """Check, before long work, that there is something to sign with.

        Raises:
            UsageError, EnvironmentUnfit: there is no key, no password of it, or no identity.
        """
        ...

    def made(self, bundle: Bundle) -> bool:
        """Return whether a bundle need not be made again, as far as this signer can tell."""
        ...

    def configure(self, config: "signing.Config") -> None:
        """Have the package sign in this way.

        Raises:
            UsageError, EnvironmentUnfit, StorageError: there is no key or identity to sign with.
        """
        ...

    def sign(self, config: "signing.Config", model: Path, signature: Path) -> None:
        """Have the package write the bundle of a model."""
        ...


class Verifier(Protocol):
    """The one by whom a model must be signed."""

    def __str__(self) -> str:
        """Return who that is, as it follows `by` in a sentence."""
        ...

    def check_hint(self, bundle: Bundle) -> None:
        """Raise SignatureRefused where a bundle itself names somebody else as its maker."""
        ...

    def configure(self, config: "verifying.Config") -> None:
        """Have the package check signatures for this signer.

        Raises:
            UsageError, StorageError: the key cannot be read, or the roots of trust cannot be had.
        """
        ...


def check_installed() -> None:
    """Raise EnvironmentUnfit where the packages of the extra are missing."""
    for package in ("model_signing", "OpenSSL"):
        check_extra(package, extra="sign", needed_by="signatures")


def signature_path(directory: Path) -> Path:
    """Return where the signature of a directory is: next to it, so that its digest does not depend on it."""
    if directory.name in ("", ".."):
        directory = Path(os.path.abspath(directory))
    return directory.with_name(directory.name + SUFFIX)


def make_bundle(files: Mapping[str, str], name: str, signer: Signer) -> Bundle:
    """Return a bundle that states these files (path -> `sha256:<hex>`) of a model of that name.

    Raises:
        UsageError, EnvironmentUnfit, StorageError: as the signer.
    """
    check_installed()
    from model_signing import signing

    config = signing.Config()
    signer.configure(config)
    config.set_hashing_config(_known_files(files, name))
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / f"model{SUFFIX}"
        signer.sign(config, Path(name), written)
        data = read_bytes(written, max_bytes=MAX_BUNDLE_BYTES)
    bundle = parse_bundle(data, f"the signature of {name}")
    assert bundle.files == dict(files), "the package signs what it is given"
    return bundle


def sign_directory(directory: Path, signer: Signer, *, signature: Path | None = None) -> Bundle:
    """Sign all files of a directory, write the bundle next to it, or to `signature`, and return it. Each file
    of an artifact is compared with the manifest first.

    Raises:
        UsageError, EnvironmentUnfit: as the signer.
        StorageError: a file is no plain file or differs from the manifest, or the bundle cannot be written.
    """
    check_installed()
    place = signature or signature_path(directory)
    name = directory.name or directory.resolve().name
    bundle = make_bundle(digests_of(directory, signature=place), name, signer)
    write_atomic(place, bundle.data)
    return bundle


def check_directory(directory: Path, verifier: Verifier, *, signature: Path | None = None) -> Bundle:
    """Check that a directory holds what was signed, file by file, and return the bundle.

    Raises:
        UsageError: there is no such directory.
        SignatureRefused: it has no signature, one of somebody else, or one of other files.
        StorageError: a file is no plain file or differs from the manifest.
    """
    check_installed()
    place = signature or signature_path(directory)
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}.", where=directory)
    if signature is None and not os.path.lexists(place):
        raise SignatureRefused(
            f"{directory} is not signed: there is no {place}.",
            where=directory,
            hint="Sign it with `compress sign`, or name its signature with --signature.",
        )
    bundle = read_bundle(place)
    check_bundle(bundle, digests_of(directory, signature=place), verifier, where=str(directory))
    return bundle


def check_bundle(bundle: Bundle, found: Mapping[str, str], verifier: Verifier, *, where: str) -> None:
    """Check that a bundle was made by whom it must be and states the files that were found (path ->
    `sha256:<hex>`) and no others.

    Raises:
        SignatureRefused: it does not.
    """
    check_made_by(bundle, verifier)
    check_files(bundle, found, where=where)


def check_made_by(bundle: Bundle, verifier: Verifier) -> None:
    """Check that the statement of a bundle was signed by whom it must be, whatever files it names.

    Raises:
        SignatureRefused: it was not.
    """
    check_installed()
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying
    from sigstore.errors import Error as SigstoreError

    verifier.check_hint(bundle)
    config = verifying.Config()
    verifier.configure(config)
    config.set_hashing_config(_known_files(bundle.files, "model"))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / f"model{SUFFIX}"
        place.write_bytes(bundle.data)
        try:
            config.verify(Path("model"), place)
        # what the packages raise for a bundle that is signed by another one, or malformed in any way
        except (
            InvalidSignature,
            SigstoreError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:
            raise SignatureRefused(
                f"{bundle.where} was not made by {verifier}{_reason(error)}.", where=bundle.where
            ) from None


def check_files(bundle: Bundle, found: Mapping[str, str], *, where: str) -> None:
    """Compare the files that a bundle states with those that were found.

    Raises:
        SignatureRefused: naming the first file that is missing, added or changed.
    """
    for name in sorted(bundle.files.keys() | found.keys()):
        if name not in found:
            raise SignatureRefused(
                f"{where} lacks the file '{name}', which was there when it was signed.", where=where
            )
        if name not in bundle.files:
            raise SignatureRefused(
                f"{where} has the file '{name}', which is not among those that were signed.", where=where
            )
        if found[name] != bundle.files[name]:
            raise SignatureRefused(
                f"the file '{name}' of {where} has changed since it was signed: its digest is {found[name]}, "
                f"and {bundle.files[name]} was signed.",
                where=where,
            )


def digests_of(directory: Path, *, signature: Path | None = None) -> dict[str, str]:
    """Return the digest of each file of a directory, its manifest and every other one, by path; without the
    signature itself where that lies inside. An artifact is compared with its manifest.

    Raises:
        StorageError: a file is no plain file, or an artifact differs from its manifest.
    """
    manifest = directory / MANIFEST_NAME
    if os.path.lexists(manifest):
        artifact = open_artifact(directory)
        verify_artifact(artifact)
        return {each.path: each.digest for each in artifact.manifest.files} | {MANIFEST_NAME: artifact.digest}
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}.", where=directory)
    inside = None if signature is None else signature.resolve()
    names = [name for name in file_names(directory) if (directory / name).resolve() != inside]
    return dict(zip(names, digest_files(directory / name for name in names), strict=True))


def _reason(error: Exception) -> str:
    """Return the first line of an error as a clause in brackets; nothing where it has no text."""
    lines = str(error).strip().splitlines()
    return f" ({lines[0][:200].rstrip('. ')})" if lines else ""


def _known_files(files: Mapping[str, str], name: str) -> "hashing.Config":
    """Return a hashing configuration of the package that reads nothing and returns digests known already, so
    that no file is read twice, and a model in a registry is signed and checked without a copy.
    """
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    serialization = manifest.SerializationType.from_args(_SERIALIZATION)
    items = [
        serialization.new_item(path, Digest("sha256", bytes.fromhex(digest.removeprefix("sha256:"))))
        for path, digest in files.items()
    ]

    class KnownFiles(hashing.Config):
        def hash(self, *args: Any, **options: Any) -> manifest.Manifest:
            return manifest.Manifest(name, items, serialization)

        def add_ignored_paths(self, *args: Any, **options: Any) -> None:
            """Leave nothing out, whatever a bundle asks for."""

    return KnownFiles()
