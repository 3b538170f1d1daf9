"""A content-addressed cache of stage results that a kill at any instant leaves whole.

    root/store/<key>/                 finished artifacts, immutable
    root/seals/<key>@<digest>         an empty file for each of them, named by the digest of its manifest
    root/parts/<key>.json             what the key is the digest of, for those and for unfinished stages
    root/damaged/<key>/               a result that no longer matched its seal, set aside
    root/tmp/<host>-<pid>-<random>/   one build in progress
    root/scratch/<key>/               resume points of unfinished stages
    root/kept/                        intermediate results that several stages reuse, named by their content
    root/runs/<name>-<digest>         the path of each run directory that uses this workspace
    root/lock, root/holders/          held by all runs, or by one command alone
    root/locks/<key>                  held by the run that builds this result

A result gets its place by one rename of a directory whose files and `compress.json` are already on the disk;
there is no other way into `store/`. The key of a result is a digest over everything that decides its bytes,
so a hit is always right and a changed recipe needs no invalidation. A key may end in `.<machine>`, for a
result whose last bits depend on the kind of machine; provenance has the key without it. The time of last
use of a finished result is the modification time of its directory.

No byte is built upon before it was compared with the manifest, and the manifest with its seal: a disk may
change what nobody wrote. Each file is read for that once in the life of a `Workspace` and of the file.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from compress.artifact.atomic import sync_directory, sync_tree, write_atomic
from compress.artifact.disk import explained
from compress.artifact.key_parts import MAX_PARTS_BYTES, KeyParts
from compress.artifact.leftovers import is_abandoned, owned_name
from compress.artifact.lock import holders, locked, locked_once, signed
from compress.artifact.manifest import (
    MANIFEST_NAME,
    Artifact,
    Manifest,
    open_artifact,
    verify_artifact,
)
from compress.artifact.seal import SEALS, STORE, seal_of
from compress.artifact.writer import ArtifactWriter, write_manifest
from compress.digest import digest_bytes, digest_file
from compress.errors import CompressError, LockHeld, StorageError
from compress.untrusted.files import read_bytes, read_text

PARTS = "parts"
RUNS = "runs"
_ELSEWHERE = "Free space there, or give another --workspace."
_MAX_PATH_BYTES = 1 << 14
_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*(\.[0-9A-Za-z_-]+)?")


class Workspace:
    """The cache below one root directory. Reads need no lock. Runs hold `share()`, and `building()` for each
    result while they build it; who removes finished results holds `lock()`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = root / STORE
        self._seals = root / SEALS
        self._damaged = root / "damaged"
        self._tmp = root / "tmp"
        self._scratch = root / "scratch"
        self._parts = root / PARTS
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    @staticmethod
    def key(
        stage: str,
        version: int,
        spec: Mapping[str, Any],
        inputs: Mapping[str, str],
        seed: int,
        extra: Mapping[str, str] | None = None,
    ) -> str:
        """Return the hex digest of everything that decides a result; `inputs` maps port names to artifact
        digests.

        `extra` is for results that depend on more than the recipe: a latency measurement on the device, for
        example.
        """
        return KeyParts(stage, version, spec, dict(inputs), seed, dict(extra or {})).key

    def describe_key(self, parts: KeyParts) -> None:
        """Store the parts of a key, so that a later miss can be explained and its result exported."""
        if self.parts_of(parts.key) is None:
            with explained(self._parts, hint=_ELSEWHERE):
                self._parts.mkdir(parents=True, exist_ok=True)
                write_atomic(self._parts_file(parts.key), parts.to_bytes())

    def parts_of(self, key: str) -> KeyParts | None:
        """Return the parts of a key; None where they were not stored, or are damaged."""
        try:
            return KeyParts.from_bytes(read_bytes(self._parts_file(key), max_bytes=MAX_PARTS_BYTES), key)
        except (OSError, StorageError):
            return None

    def register_run(self, directory: Path) -> None:
        """Store the path of a run directory that uses this workspace. A link would lead programs that follow
        links around in a circle.
        """
        path = directory.resolve()
        place = digest_bytes(str(path).encode()).removeprefix("sha256:")[:12]
        with explained(self.root, hint=_ELSEWHERE):
            (self.root / RUNS).mkdir(parents=True, exist_ok=True)
            write_atomic(self.root / RUNS / f"{path.name}-{place}", f"{path}\n".encode())

    def registered_run(self, record: Path) -> Path | None:
        """Return the run directory that a record names; None where it is gone, or the record is damaged."""
        try:
            path = Path(read_text(record, max_bytes=_MAX_PATH_BYTES).removesuffix("\n"))
            return path if path.is_dir() else None
        except (OSError, StorageError, ValueError):
            return None

    def registered_runs(self) -> list[Path]:
        """Return the run directories that use this workspace and are still there."""
        found = (self.registered_run(each) for each in sorted((self.root / RUNS).glob("[!.]*")))
        return [each for each in found if each is not None]

    def result_keys(self) -> list[str]:
        """Return the keys of all finished results, sorted."""
        return sorted(path.name for path in self._store.glob("*") if _KEY.fullmatch(path.name))

    def mark_used(self, key: str) -> None:
        """Set the time of last use of a finished result to now. One that another user owns keeps its own."""
        with contextlib.suppress(PermissionError):
            os.utime(self._place(self._store, key))

    def get(self, key: str) -> Artifact | None:
        """Return the finished result of that key after comparing every byte with its manifest and the
        manifest with its seal; None where there is none, or a damaged one.
        """
        try:
            return self._checked(key)
        except (CompressError, OSError):  # any damage means: build it again
            return None

    def damage(self, key: str) -> str | None:
        """Return one sentence on what is wrong with the finished result of that key; None where it is whole
        or missing.
        """
        try:
            self._checked(key)
        except CompressError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or self._place(self._store, key)} cannot be read: {error.strerror}."
        return None

    def set_aside(self, key: str) -> Path:
        """Move the finished result of that key to `damaged/`, in place of an earlier one, and return where it
        is now.
        """
        aside = self._place(self._damaged, key)
        self._damaged.mkdir(parents=True, exist_ok=True)
        self.remove(aside)
        os.rename(self._place(self._store, key), aside)
        return aside

    def _checked(self, key: str) -> Artifact | None:
        """Return the finished result of that key, None where there is none.

        Raises:
            StorageError, UsageError, OSError: it is damaged.
        """
        path = self._place(self._store, key)
        if not os.path.lexists(path):
            return None
        artifact = open_artifact(path)
        verify_artifact(artifact, digest_of=self._digest_of)
        if artifact.manifest.provenance.get("key") != key.partition(".")[0]:
            raise StorageError(f"{path} is the result of another key.")
        return artifact

    def _digest_of(self, path: Path) -> str:
        """Return the digest of a file; one that has not changed since it was last asked for is not read
        again."""
        entry = path.stat()
        state = (entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns, entry.st_ino)
        known = self._known.get(path)
        if known is None or known[0] != state:
            known = (state, digest_file(path))
            self._known[path] = known
        return known[1]

    def commit(
        self, key: str, stage: str, inputs: Mapping[str, str], build: Callable[[ArtifactWriter], None]
    ) -> Artifact:
        """Return the result of that key, building it first when it is not there; `inputs` are its parents'
        digests by name.

        Whatever `build` raises passes through after its directory is removed; its scratch directory stays for
        the next attempt.
        """

        def make(building: Path) -> str:
            writer = ArtifactWriter(building)
            build(writer)
            if writer.description is None:
                raise ValueError(f"stage '{stage}' did not call describe()")
            provenance = {"stage": stage, "key": key.partition(".")[0], "parents": dict(inputs)}
            return write_manifest(building, writer.description, provenance)

        return self._stored(key, make)

    def adopt(self, key: str, fetch: Callable[[Path], Manifest]) -> Artifact:
        """Return the result of that key, fetching it first when it is not there: `fetch` writes the files of
        a result that was built elsewhere into an empty directory, and returns their manifest.

        Raises:
            StorageError: a file is not as the manifest states, or the manifest is of another key; nothing is
                stored then. Whatever `fetch` raises passes through.
        """

        def make(building: Path) -> str:
            manifest = fetch(building)
            write_atomic(building / MANIFEST_NAME, manifest.to_bytes())
            if manifest.provenance.get("key") != key.partition(".")[0]:
                raise StorageError(f"what was fetched for the key {key} is the result of another key.")
            verify_artifact(Artifact(building, manifest))
            sync_tree(building)
            return manifest.digest

        return self._stored(key, make)

    def _stored(self, key: str, make: Callable[[Path], str]) -> Artifact:
        """Return the result of that key. Where there is none, `make` writes it with its manifest into a new
        directory, and returns the manifest's digest.
        """
        if (present := self.get(key)) is not None:
            return present
        building = self._tmp / owned_name()
        try:
            with explained(building, hint=_ELSEWHERE):
                self._tmp.mkdir(parents=True, exist_ok=True)
                self._store.mkdir(parents=True, exist_ok=True)
                building.mkdir()
                self._publish(building, key, make(building))
        finally:
            shutil.rmtree(building, ignore_errors=True)  # gone already when it was published
        artifact = open_artifact(self._place(self._store, key))
        self.drop_scratch(key)
        return artifact

    def discard(self, key: str) -> None:
        """Forget a finished result and its resume points, so that the next `commit` builds it again."""
        self.remove(self._place(self._store, key))
        for seal in self._seals.glob(f"{key}@*"):
            seal.unlink(missing_ok=True)
        self.drop_scratch(key)

    def scratch(self, key: str) -> Path:
        """Return a directory for the resume points of an unfinished stage; it outlives a killed run and is
        removed when the result is committed.
        """
        path = self._place(self._scratch, key)
        with explained(path, hint=_ELSEWHERE):
            path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def kept(self) -> Path:
        """A directory for results that are costly to make, named by content and safe to delete (a teacher's
        logits).
        """
        path = self.root / "kept"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def drop_scratch(self, key: str) -> None:
        shutil.rmtree(self._place(self._scratch, key), ignore_errors=True)

    def lock(self) -> AbstractContextManager[None]:
        """Be alone in this workspace, with no run active, and clear away what killed runs left in `tmp/`.

        Raises:
            LockHeld: another process uses it; the message names it. The kernel frees the lock of a process
                that died, however it died.
        """
        return self._held(shared=False)

    def share(self) -> AbstractContextManager[None]:
        """Be one of the runs in this workspace, and clear away what killed runs left in `tmp/`.

        Raises:
            LockHeld: a process has it alone; the message names it.
        """
        return self._held(shared=True)

    @contextlib.contextmanager
    def building(self, key: str, *, wait: Callable[[], None]) -> Iterator[None]:
        """Be the only run that builds the result of that key; `wait` is called while another one does, and
        raises to give up. A run holds one at a time, so no two wait for each other.
        """
        parent = self.root / "locks"
        with explained(parent, hint=_ELSEWHERE):
            parent.mkdir(parents=True, exist_ok=True)
        with locked_once(self._place(parent, key), wait=wait):
            yield

    @contextlib.contextmanager
    def _held(self, *, shared: bool) -> Iterator[None]:
        listed = self.root / "holders"
        with contextlib.ExitStack() as stack:
            try:
                with explained(self.root, hint=_ELSEWHERE):
                    self.root.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(self.root / "lock", shared=shared))
            except BlockingIOError as error:
                raise LockHeld(
                    f"the workspace {self.root} is in use by {holders(listed)}; wait for that run to end or "
                    f"stop it, or give this run another workspace."
                ) from error
            with explained(self.root, hint=_ELSEWHERE):
                stack.enter_context(signed(listed))
                self._collect()
            yield

    def remove(self, path: Path) -> None:
        """Take something in the workspace away by one rename, then delete it. After a kill the next holder of
        the lock deletes the rest.
        """
        if os.path.lexists(path):
            self._tmp.mkdir(parents=True, exist_ok=True)
            os.rename(path, discarded := self._tmp / owned_name())
            _delete(discarded)

    def _publish(self, building: Path, key: str, digest: str) -> None:
        place = self._place(self._store, key)
        self._seals.mkdir(parents=True, exist_ok=True)
        seal_of(place, digest).touch()
        sync_directory(self._seals)
        if self.get(key) is None and os.path.lexists(place):  # damaged: never write into it
            self.set_aside(key)
        try:
            os.rename(building, place)
        except OSError:
            if self.get(key) is None:  # otherwise another process was first, with the same bytes
                raise
        sync_directory(self._store)

    def _collect(self) -> None:
        """Remove builds of processes that are gone, as another process may commit without holding the lock,
        and the resume points of finished results: a kill may come between a result and their removal.
        """
        for path in self._tmp.glob("*"):
            if is_abandoned(path, path.name):
                _delete(path)
        for path in self._scratch.glob("*"):
            if (self._store / path.name).is_dir():
                _delete(path)

    def _parts_file(self, key: str) -> Path:
        return self._place(self._parts, key).with_name(f"{key}.json")

    @staticmethod
    def _place(parent: Path, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"'{key}' is not a workspace key")
        return parent / key


def _delete(path: Path) -> None:
    """Delete a directory, as far as that is possible, or a file or link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
