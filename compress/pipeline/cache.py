"""The caches in registries that a recipe names, as one run uses them: it pulls instead of building, and
pushes what it built. Nothing of it decides a result, so whatever fails is a warning and the stage is built.
"""

from collections.abc import Callable
from pathlib import Path

from compress.artifact.key_parts import KeyParts
from compress.artifact.manifest import Artifact, Manifest
from compress.artifact.workspace import Workspace
from compress.context import Progress, never
from compress.errors import CompressError, Interrupted, RecipeError, UsageError
from compress.recipe import Cache
from compress.registry.protocol import REGISTRIES
from compress.registry.stage_cache import CachedStage, StageCache, parse_cache_ref

_LOCAL = "layout"
"""The scheme of registries that need no network."""


def check_cache(cache: Cache, file: str) -> None:
    """Refuse the name of a cache that cannot be one, before any work.

    Raises:
        RecipeError: it is malformed, or nothing serves its scheme.
    """
    for place, text in (("from", cache.source), ("to", cache.target)):
        if text is None:
            continue
        try:
            REGISTRIES.get(parse_cache_ref(text).scheme)
        except UsageError as error:
            raise RecipeError(f"{file}: cache.{place}: {error}") from None


def opened(text: str | None, *, offline: bool, warn: Callable[[str], None]) -> StageCache | None:
    """Return the cache of a reference; None, after a warning, where it cannot be used here."""
    if text is None:
        return None
    if offline and parse_cache_ref(text).scheme != _LOCAL:
        warn(f"the cache {text} is not used offline.")
        return None
    try:
        return StageCache(text)
    except CompressError as error:
        warn(f"the cache {text} is not used: {error}")
        return None


class RunCache:
    """The cache that a run pulls from, the one that it pushes to, or neither. One that fails to answer is not
    asked again in the same run.
    """

    def __init__(
        self,
        source: StageCache | None = None,
        target: StageCache | None = None,
        *,
        warn: Callable[[str], None] = lambda sentence: None,
        stop_signal: Callable[[], int | None] = never,
    ) -> None:
        self._source = source
        self._target = target
        self._warn = warn
        self._stop_signal = stop_signal

    def pull(self, parts: KeyParts, workspace: Workspace, progress: Progress) -> Artifact | None:
        """Return the result of a key, brought into the workspace; None where the cache lacks it, cannot be
        reached, or has something else under that key.

        Raises:
            Interrupted: a signal asked the run to stop.
        """
        found = self._found(parts)
        if found is None or self._source is None:
            return None
        try:
            return adopt(self._source, found, workspace, self._stoppable(progress))
        except Interrupted:
            raise
        except (CompressError, OSError) as error:
            self._warn_of(parts, error)
            return None

    def push(self, parts: KeyParts, artifact: Artifact, progress: Progress) -> None:
        """Put a result into the cache that the run pushes to, unless that has the key.

        Raises:
            Interrupted: a signal asked the run to stop.
        """
        if self._target is None:
            return
        try:
            if not has_key(self._target, parts.key):
                self._target.store(parts, artifact, progress=self._stoppable(progress))
        except Interrupted:
            raise
        except (CompressError, OSError) as error:
            self._warn(f"the cache {self._target} is not written any more in this run: {error}")
            self._target = None

    def _found(self, parts: KeyParts) -> CachedStage | None:
        """Return the entry of a key, None where the cache has none that can be used."""
        if self._source is None:
            return None
        try:
            found = self._source.look_up(parts.key)
        except CompressError as error:
            first_use = isinstance(error, UsageError) and str(self._source) == str(self._target)
            if not first_use:  # else the first push makes the registry
                self._warn(f"the cache {self._source} is not used in this run: {error}")
            self._source = None
            return None
        try:
            return None if found is None else self._source.entry(parts, found)
        except CompressError as error:
            self._warn_of(parts, error)
            return None

    def _warn_of(self, parts: KeyParts, error: Exception) -> None:
        self._warn(f"'{parts.stage}' is built, because its entry in {self._source} cannot be used: {error}")

    def _stoppable(self, progress: Progress) -> Progress:
        return _Stoppable(progress, self._stop_signal)


def adopt(cache: StageCache, found: CachedStage, workspace: Workspace, progress: Progress) -> Artifact:
    """Bring an entry of a cache into the workspace, whole or not at all, and return it.

    Raises:
        StorageError: a blob is missing or differs from its digest, or the workspace cannot be written.
    """

    def fetch(directory: Path) -> Manifest:
        return cache.fetch(found, directory, progress=progress)

    artifact = workspace.adopt(found.parts.key, fetch)
    workspace.describe_key(found.parts)
    return artifact


def has_key(cache: StageCache, key: str) -> bool:
    """Return whether a cache has a key; one that the first push makes has none."""
    try:
        return cache.look_up(key) is not None
    except UsageError:
        return False


class _Stoppable:
    """Progress of a transfer that ends where a signal asks the run to stop."""

    def __init__(self, inner: Progress, stop_signal: Callable[[], int | None]) -> None:
        self._inner = inner
        self._stop_signal = stop_signal

    def update(self, done: int, total: int, note: str) -> None:
        self._inner.update(done, total, note)
        number = self._stop_signal()
        if number is not None:
            raise Interrupted(
                "stopped during a transfer of the cache; the same command resumes here.", signal_number=number
            )

    def log(self, text: str) -> None:
        self._inner.log(text)
