"""The signatures of what a recipe pushes, the artifact and its evidence: made once for the same files and the
same signer, and kept in the run directory, next to the link to the artifact and to the evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import Artifact
from compress.errors import SignatureRefused
from compress.pipeline.run_dir import RunDir
from compress.recipe import Push
from compress.registry.protocol import Registry
from compress.registry.signatures import files_of_artifact, newest_signature
from compress.sign.bundle import Bundle, read_bundle
from compress.sign.signature import Signer, make_bundle, signature_path


@dataclass(frozen=True)
class RunSignatures:
    """The signatures of what one run pushes: kept from an earlier run if they are of the same files and the
    same signer, else made; without a signer those that are there for the same files.

    Raises:
        UsageError, EnvironmentUnfit, StorageError: from both methods, as the signer.
    """

    signer: Signer | None
    directory: RunDir

    def of_artifact(self, artifact: Artifact) -> Bundle | None:
        kind = str(artifact.manifest.provenance["stage"])
        return self.of_evidence(self.directory.link_of(kind), files_of_artifact(artifact))

    def of_evidence(self, directory: Path, files: Mapping[str, str]) -> Bundle | None:
        place = signature_path(directory)
        kept = _kept(place)
        if kept is not None and kept.files == files and (self.signer is None or self.signer.made(kept)):
            return kept
        if self.signer is None:
            return None
        bundle = make_bundle(files, directory.name, self.signer)
        write_atomic(place, bundle.data)
        return bundle


def is_signed(push: Push, registry: Registry, tag: str) -> bool:
    """Return whether what a tag points to has a signature as the recipe wants it, if it wants one."""
    if push.sign is None:
        return True
    repository = registry.repository(push.name)
    found = repository.read_tag(push.name, tag)
    try:
        bundle = None if found is None else newest_signature(repository, found)
    except SignatureRefused:
        return False
    return bundle is not None and push.sign.signer().made(bundle)


def _kept(place: Path) -> Bundle | None:
    try:
        return read_bundle(place)
    except SignatureRefused:  # none yet, or damaged: it is made anew
        return None
