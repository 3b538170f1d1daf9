"""Seals of a workspace: for each finished artifact an empty file whose name has the digest of its manifest.

A manifest has the digest of every other file, and the name of the seal has the digest of the manifest. Only
the name is read.
"""

from pathlib import Path

from compress.errors import StorageError

STORE = "store"
SEALS = "seals"


def seal_of(place: Path, digest: str) -> Path:
    """Return the seal of the artifact at `<workspace>/store/<key>` with a manifest of that digest."""
    return place.parent.parent / SEALS / f"{place.name}@{digest.removeprefix('sha256:')}"


def check_seal(path: Path, digest: str) -> None:
    """Check that an artifact in a workspace has the manifest that was stored there. One in another directory
    has no seal and passes.

    Raises:
        StorageError: the manifest has changed.
    """
    place = path.resolve()
    if place.parent.name != STORE or not (place.parent.parent / SEALS).is_dir():
        return
    seal = seal_of(place, digest)
    if seal.exists():
        return
    if any(seal.parent.glob(f"{place.name}@*")):
        raise StorageError(
            f"{path}/compress.json has changed since it was stored; run its recipe again to build it anew."
        )
    raise StorageError(f"{path} has no seal in {seal.parent}; run its recipe again to build it anew.")
