"""Entries of a workspace to and from a cache in a registry, all of them or those of one recipe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compress.artifact.key_parts import KeyParts
from compress.artifact.workspace import Workspace
from compress.context import Progress
from compress.errors import CompressError, Interrupted
from compress.pipeline.cache import adopt, has_key
from compress.pipeline.keys import key_parts, source_digests
from compress.pipeline.steps import Step
from compress.recipe import Recipe
from compress.registry.model_source import ModelSource
from compress.registry.stage_cache import StageCache


@dataclass
class Exchanged:
    """The outcome of an exchange: keys that were copied, keys that were there already, stages of a recipe
    that are not to be had, and the reason for each entry that was refused.
    """

    copied: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0


@dataclass(frozen=True)
class Wanted:
    """The stages of one recipe on one machine, whose keys follow from what is already there."""

    recipe: Recipe
    steps: Sequence[Step]
    source: ModelSource
    device: str


def export_entries(
    workspace: Workspace, cache: StageCache, progress: Progress, *, wanted: Wanted | None = None
) -> Exchanged:
    """Copy results of a workspace into a cache, whole ones only; a key that the cache has is passed over.

    Raises:
        StorageError: the registry cannot be read or written; the entries before that are there.
    """
    found = Exchanged()

    def export(parts: KeyParts) -> bool:
        return _export_one(workspace, cache, progress, parts.key, found)

    if wanted is not None:
        _in_turn(workspace, wanted, export, found)
        return found
    for key in workspace.result_keys():
        _export_one(workspace, cache, progress, key, found)
    return found


def import_entries(
    workspace: Workspace, cache: StageCache, progress: Progress, *, wanted: Wanted | None = None
) -> Exchanged:
    """Copy entries of a cache into a workspace, each whole or not at all; the caller holds the lock. An entry
    that cannot be read whole, or is not what its key and digests state, is refused, and the others come.

    Raises:
        UsageError: there is no registry.
        StorageError: the registry cannot be read.
    """
    found = Exchanged()

    def fetch(parts: KeyParts) -> bool:
        return _import_one(workspace, cache, progress, parts.key, parts, found)

    if wanted is not None:
        _in_turn(workspace, wanted, fetch, found)
        return found
    for key in cache.entry_keys():
        _import_one(workspace, cache, progress, key, None, found)
    return found


def _in_turn(
    workspace: Workspace, wanted: Wanted, copy: Callable[[KeyParts], bool], found: Exchanged
) -> None:
    """Copy the stages of a recipe in turn, because the digest of one decides the key of the next. Where one
    is not to be had, it and those after it are missing.
    """
    digests = source_digests(wanted.source)
    for idx, step in enumerate(wanted.steps):
        parts = key_parts(step, digests, wanted.recipe.seed, wanted.device)
        artifact = workspace.get(parts.key) if copy(parts) else None
        if artifact is None:
            found.missing += [each.stage.kind for each in wanted.steps[idx:]]
            return
        digests[step.stage.gives] = artifact.digest


def _export_one(
    workspace: Workspace, cache: StageCache, progress: Progress, key: str, found: Exchanged
) -> bool:
    """Export one result unless the cache has it; return whether the workspace has it whole."""
    artifact = workspace.get(key)
    parts = workspace.parts_of(key)
    if artifact is None:
        damage = workspace.damage(key)
        if damage is not None:
            found.refused[key] = damage
    elif parts is None:
        found.refused[key] = "the parts of its key were not stored; run its recipe again."
    elif has_key(cache, key):
        found.present.append(key)
    else:
        cache.store(parts, artifact, progress=progress)
        found.copied.append(key)
        found.size_bytes += artifact.size_bytes
    return artifact is not None


def _import_one(
    workspace: Workspace,
    cache: StageCache,
    progress: Progress,
    key: str,
    parts: KeyParts | None,
    found: Exchanged,
) -> bool:
    """Import one entry unless it is there; return whether the workspace has it then."""
    if workspace.get(key) is not None:
        found.present.append(key)
        return True
    descriptor = cache.look_up(key)
    if descriptor is None:
        return False
    try:
        entry = cache.entry_of_key(key, descriptor) if parts is None else cache.entry(parts, descriptor)
        artifact = adopt(cache, entry, workspace, progress)
    except Interrupted:
        raise
    except CompressError as error:
        found.refused[key] = str(error)
        return False
    found.copied.append(key)
    found.size_bytes += artifact.size_bytes
    return True
