"""A look ahead, stage by stage, without building: whether a run finds the result in the workspace, in a cache
of a registry, or nowhere, with the reason.

The key of a stage needs the digests of its inputs. Where an earlier stage must be built first its digest is
not there yet; the stage then counts as a miss if no entry could be its result whatever that digest, else as
unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.artifact.key_parts import KeyParts
from compress.artifact.workspace import Workspace
from compress.errors import CompressError, UsageError
from compress.pipeline.keys import key_parts, ports_read, source_digests
from compress.pipeline.steps import Step
from compress.recipe import Recipe
from compress.registry.model_source import ModelSource
from compress.registry.stage_cache import StageCache
from compress.stages import Port

WORKSPACE = "workspace"
_PENDING = "pending"
_MAX_DIFFERENCES = 4


@dataclass(frozen=True)
class Lookup:
    """The outcome for one stage. `cached` is None where that depends on what is built first, and so is `key`.
    `found_in` is the workspace, or the reference of a cache; `reason` is why it is not a hit.
    """

    cached: bool | None
    found_in: str | None = None
    reason: str | None = None
    key: str | None = None


def lookups(
    recipe: Recipe,
    steps: Sequence[Step],
    source: ModelSource,
    workspace: Workspace,
    device: str,
    *,
    cache: StageCache | None = None,
) -> list[Lookup]:
    """Return what a run would find of each step. Every byte of a hit in the workspace is compared with its
    digest; of one in the cache only the manifests are read.
    """
    search = _Search(workspace, cache)
    digests: dict[Port, str] = dict(source_digests(source))
    waits: dict[Port, str] = {}
    found = []
    for step in steps:
        parts = key_parts(step, digests, recipe.seed, device)
        missing = [waits[port] for port in ports_read(step, digests) if port in waits]
        if missing:
            outcome = search.without_inputs(parts, missing[0])
        else:
            outcome, digest = search.of_key(parts)
            digests[step.stage.gives] = digest or _PENDING
        if outcome.cached:
            waits.pop(step.stage.gives, None)
        else:
            digests[step.stage.gives] = _PENDING
            waits[step.stage.gives] = step.stage.kind
        found.append(outcome)
    return found


class _Search:
    """The look-ups of one plan. A cache that fails to answer is not asked again."""

    def __init__(self, workspace: Workspace, cache: StageCache | None) -> None:
        self._workspace = workspace
        self._cache = cache
        stored = [workspace.parts_of(key) for key in workspace.result_keys()]
        self._known = [parts for parts in stored if parts is not None]

    def of_key(self, parts: KeyParts) -> tuple[Lookup, str | None]:
        """Return the outcome for a key, and the digest of the artifact where it is a hit."""
        key = parts.key
        artifact = self._workspace.get(key)
        if artifact is not None:
            return Lookup(True, WORKSPACE, key=key), artifact.digest
        damage = self._workspace.damage(key)
        remote, digest = self._in_cache(parts)
        if digest is not None:
            return Lookup(True, str(self._cache), key=key), digest
        reasons = [each for each in (damage or _nearest(parts, self._of_stage(parts)), remote) if each]
        return Lookup(False, reason="; ".join(reasons), key=key), None

    def without_inputs(self, parts: KeyParts, awaited: str) -> Lookup:
        """Return the outcome for a stage that reads the result of one that must be built first."""
        unknown = Lookup(None, reason=f"unknown until '{awaited}' is built")
        if self._cache is not None:
            return unknown
        known = [replace(each, inputs={}) for each in self._of_stage(parts)]
        inputless = replace(parts, inputs={})
        if any(not inputless.differences(each) for each in known):
            return unknown
        return Lookup(False, reason=_nearest(inputless, known))

    def _in_cache(self, parts: KeyParts) -> tuple[str | None, str | None]:
        """Return why the cache has no entry of a key, or the digest of its artifact."""
        if self._cache is None:
            return None, None
        try:
            found = self._cache.look_up(parts.key)
        except CompressError as error:
            there = "has nothing yet" if isinstance(error, UsageError) else "cannot be read"
            trouble = f"the cache {self._cache} {there}: {error}"
            self._cache = None
            return trouble, None
        if found is None:
            return f"not in {self._cache}", None
        try:
            return None, self._cache.entry(parts, found).digest
        except CompressError as error:
            return str(error), None

    def _of_stage(self, parts: KeyParts) -> list[KeyParts]:
        return [each for each in self._known if each.stage == parts.stage]


def _nearest(parts: KeyParts, known: Sequence[KeyParts]) -> str:
    """Return in what a key differs from the most similar of the known ones of its stage."""
    if not known:
        return "no entry of this stage"
    names = min((parts.differences(each) for each in known), key=len)
    more = f" and {len(names) - _MAX_DIFFERENCES} more" if len(names) > _MAX_DIFFERENCES else ""
    return f"differs from the nearest entry in {', '.join(names[:_MAX_DIFFERENCES])}{more}"
