"""The directory of a model that a person names: a path, `builtin://`, `hf://`, a registry reference, or
`models:/name@alias` of MLflow."""

from pathlib import Path

from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
from compress.errors import UsageError, did_you_mean
from compress.recipe import parse_model_ref
from compress.recipe.model_ref import MODELS_URI
from compress.registry.local_copy import local_copy
from compress.registry.model_source import locate_model, model_digest
from compress.registry.protocol import REGISTRIES
from compress.stages import Input


def find_model_dir(ref: str, *, offline: bool = False, cache_dir: Path | None = None) -> Path:
    """Return the directory of a model, fetched or pulled if it is not here.

    Raises:
        UsageError: the reference means nothing.
        StorageError: the hub or the registry cannot be reached or does not have it.
    """
    scheme, separator, _ = ref.partition("://")
    if ref.startswith(MODELS_URI) or (separator and scheme != "hf" and scheme in REGISTRIES.names()):
        return local_copy(ref, cache_dir)
    if separator and scheme not in ("builtin", "hf"):
        known = sorted({"builtin", "hf", *REGISTRIES.names()})
        raise UsageError(
            f"unknown scheme '{scheme}://' of a model.{did_you_mean(scheme, known)} A directory needs none."
        )
    model = parse_model_ref(ref)
    return locate_model(model.scheme, model.name, model.revision, offline=offline)[0]


def find_candidate(ref: str, *, offline: bool = False) -> Input:
    """Return a model that is to be validated, and its digest: that of its manifest, after every file was
    checked against it, or that of its files where it has no manifest.

    Raises:
        UsageError, StorageError: as `find_model_dir`, or a file does not match the manifest.
    """
    path = find_model_dir(ref, offline=offline)
    if not (path / MANIFEST_NAME).exists():
        return Input(path, model_digest(path))
    artifact = open_artifact(path)
    verify_artifact(artifact)
    return Input(path, artifact.digest)
