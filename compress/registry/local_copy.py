"""Artifacts of a registry kept on this machine, one directory for each manifest digest: pulled once, then
found again.
"""

from pathlib import Path

from compress.artifact.leftovers import set_aside
from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
from compress.errors import CompressError
from compress.registry.ref import Ref
from compress.registry.stored import artifact_of, resolve
from compress.registry.transfer import pull

DEFAULT_CACHE = Path("~/.cache/compress/artifacts")


def local_copy(ref: Ref | str, cache_dir: Path | None = None) -> Path:
    """Return a directory with the artifact that a reference means now, every byte of it checked; pulled where
    it is not here yet or damaged.

    Raises:
        UsageError: the reference means nothing.
        StorageError: the registry cannot be read, or a blob differs from its digest.
    """
    pinned = resolve(ref)
    assert pinned.digest is not None, "resolve pins the digest"
    directory = (cache_dir or DEFAULT_CACHE.expanduser()) / pinned.digest.removeprefix("sha256:")
    if directory.exists():
        if _is_whole(directory, pinned):
            return directory
        set_aside(directory)
    try:
        pull(pinned, directory)
    except CompressError:
        if not (directory / MANIFEST_NAME).is_file():  # another process may have pulled it meanwhile
            raise
    return directory


def kept_copy(digest: str, cache_dir: Path | None = None) -> Path | None:
    """Return the directory of an artifact that was pulled before, by its manifest's digest, with every byte
    checked; None where there is none.
    """
    directory = (cache_dir or DEFAULT_CACHE.expanduser()) / digest.removeprefix("sha256:")
    try:
        verify_artifact(open_artifact(directory))
    except CompressError:
        return None
    return directory


def _is_whole(directory: Path, pinned: Ref) -> bool:
    """Return whether a directory has the artifact of a reference, byte for byte."""
    try:
        artifact = open_artifact(directory)
        verify_artifact(artifact)
    except CompressError:
        return False
    return artifact.digest == artifact_of(pinned)
