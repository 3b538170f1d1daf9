"""The signature of the artifact that a recipe pushes: made once for the same files and the same signer, kept
beside the link to the artifact in the run directory.
"""

from pathlib import Path

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import Artifact
from compress.errors import SignatureRefused
from compress.pipeline.run_dir import RunDir
from compress.recipe import Push
from compress.registry.protocol import Registry
from compress.registry.signatures import files_of_artifact, newest_signature
from compress.sign.bundle import Bundle, read_bundle
from compress.sign.choice import signer_of
from compress.sign.signature import Signer, make_bundle, signature_path


def signer_of_push(push: Push) -> Signer | None:
    """Return who signs what a recipe pushes; None where nobody does.

    Raises:
        UsageError: neither or both ways of signing are given.
    """
    if push.sign is None:
        return None
    key, password_file, trust_config = (
        None if each is None else Path(each)
        for each in (push.sign.key, push.sign.password_file, push.sign.trust_config)
    )
    return signer_of(
        key=key, password_file=password_file, keyless=push.sign.keyless, trust_config=trust_config
    )


def signature_of(artifact: Artifact, signer: Signer | None, directory: RunDir) -> Bundle | None:
    """Return the signature that is pushed with a stage's artifact: the one in the run directory if it is of
    these files and of the same signer, else a new one; without a signer, the one there or None.

    Raises:
        UsageError, EnvironmentUnfit, StorageError: as the signer.
    """
    kind = str(artifact.manifest.provenance["stage"])
    place = signature_path(directory.link_of(kind))
    files = files_of_artifact(artifact)
    kept = _kept(place)
    if kept is not None and kept.files == files and (signer is None or signer.made(kept)):
        return kept
    if signer is None:
        return None
    bundle = make_bundle(files, kind, signer)
    write_atomic(place, bundle.data)
    return bundle


def is_signed(push: Push, registry: Registry, tag: str) -> bool:
    """Return whether what a tag points to has a signature as the recipe wants it, if it wants one."""
    signer = signer_of_push(push)
    if signer is None:
        return True
    repository = registry.repository(push.name)
    found = repository.read_tag(push.name, tag)
    try:
        bundle = None if found is None else newest_signature(repository, found)
    except SignatureRefused:
        return False
    return bundle is not None and signer.made(bundle)


def _kept(place: Path) -> Bundle | None:
    try:
        return read_bundle(place)
    except SignatureRefused:  # none yet, or damaged: it is made anew
        return None
