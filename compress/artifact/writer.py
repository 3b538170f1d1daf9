"""The place into which a stage writes its result, and the manifest that vouches for what is there."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.artifact.atomic import sync_tree, write_atomic
from compress.artifact.manifest import MANIFEST_NAME, Manifest, describe_files
from compress.digest import canonical_json


class ArtifactWriter:
    """The place for a stage's result: a directory of its own, and `describe`, to be called exactly once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description: dict[str, Any] | None = None

    def describe(
        self,
        *,
        role: str,
        arch: Mapping[str, Any] | None = None,
        layers: Iterable[Mapping[str, Any]] = (),
        scheme: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Say what the artifact is; all values must be JSON (a NaN or a tensor raises here, where it was
        made).
        """
        if self.description is not None:
            raise ValueError("describe() was called twice for one artifact")
        described = {
            "role": role,
            "arch": arch,
            "layers": [dict(layer) for layer in layers],
            "scheme": scheme,
            "facts": dict(facts or {}),
        }
        self.description = json.loads(canonical_json(described))


def write_manifest(path: Path, description: dict[str, Any], provenance: dict[str, Any]) -> str:
    """Bring every file to the disk, then the manifest that vouches for them; return its digest."""
    files, tensors = describe_files(path)
    sync_tree(path)
    manifest = Manifest(
        **{**description, "layers": tuple(description["layers"])},
        provenance=provenance,
        tensors=tensors,
        files=files,
    )
    write_atomic(path / MANIFEST_NAME, manifest.to_bytes())
    return manifest.digest
