"""Opening weights, whichever store they lie in: a Hugging Face directory or an artifact of an earlier stage."""

from pathlib import Path

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.export import open_checkpoint
from compress.models.canonical import OUTER_NAME, CanonicalStore
from compress.models.weights import WeightSource


def open_weights(path: Path) -> WeightSource:
    """The store at `path` as a `WeightSource`.

    Raises:
        UsageError: no model lies there.
        UnsupportedArch, UnsupportedFormat: it is not understood wholly.
    """
    if (path / MANIFEST_NAME).exists() and (path / OUTER_NAME).exists():
        return CanonicalStore(open_artifact(path))
    return open_checkpoint(path)
