"""A content-addressed cache of stage results that a kill at any instant leaves whole.

    root/store/<key>/                 finished artifacts, immutable
    root/tmp/<host>-<pid>-<random>/   one build in progress
    root/scratch/<key>/               resume points of unfinished stages
    root/kept/                        intermediate results that several stages reuse, named by their content
    root/lock, root/lock.holder       one run at a time

A result gets its place by one rename of a directory whose files and `compress.json` are already on the disk;
there is no other way into `store/`. The key of a result is a digest over everything that decides its bytes,
so a hit is always right and a changed recipe needs no invalidation.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from compress.artifact.atomic import sync_directory, sync_tree
from compress.artifact.atomic import write_atomic as write_atomic
from compress.artifact.manifest import MANIFEST_NAME, Artifact, Manifest, describe_files, open_artifact
from compress.digest import canonical_json, digest_json
from compress.errors import CompressError, LockHeld

_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*")


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


class Workspace:
    """The cache below one root directory. Reads need no lock; a run holds `lock()` while it writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = root / "store"
        self._tmp = root / "tmp"
        self._scratch = root / "scratch"

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
        parts = {
            "stage": stage,
            "version": version,
            "spec": spec,
            "inputs": dict(inputs),
            "seed": seed,
            "extra": dict(extra or {}),
        }
        return digest_json(parts).removeprefix("sha256:")

    def get(self, key: str) -> Artifact | None:
        """Return the finished result of that key, or None; one with a damaged manifest, a missing or a cut
        file counts as missing.
        """
        path = self._place(self._store, key)
        try:
            artifact = open_artifact(path)
            whole = all(
                (path / record.path).stat().st_size == record.size_bytes for record in artifact.manifest.files
            )
        except (CompressError, OSError):  # any damage means: build it again
            return None
        return artifact if whole and artifact.manifest.provenance.get("key") == key else None

    def commit(
        self, key: str, stage: str, inputs: Mapping[str, str], build: Callable[[ArtifactWriter], None]
    ) -> Artifact:
        """Return the result of that key, building it first when it is not there; `inputs` are its parents'
        digests by name.

        Whatever `build` raises passes through after its directory is removed; its scratch directory stays for
        the next attempt.
        """
        if (present := self.get(key)) is not None:
            return present
        self._tmp.mkdir(parents=True, exist_ok=True)
        self._store.mkdir(parents=True, exist_ok=True)
        building = self._tmp / f"{_host()}-{os.getpid()}-{secrets.token_hex(6)}"
        building.mkdir()
        try:
            writer = ArtifactWriter(building)
            build(writer)
            if writer.description is None:
                raise ValueError(f"stage '{stage}' did not call describe()")
            _seal(building, writer.description, {"stage": stage, "key": key, "parents": dict(inputs)})
            self._publish(building, key)
        finally:
            shutil.rmtree(building, ignore_errors=True)  # gone already when it was published
        artifact = open_artifact(self._place(self._store, key))
        self.drop_scratch(key)
        return artifact

    def discard(self, key: str) -> None:
        """Forget a finished result and its resume points, so that the next `commit` builds it again."""
        place = self._place(self._store, key)
        if place.exists():
            self._tmp.mkdir(parents=True, exist_ok=True)
            os.rename(place, discarded := self._tmp / f"{_host()}-{os.getpid()}-{secrets.token_hex(6)}")
            shutil.rmtree(discarded, ignore_errors=True)
        self.drop_scratch(key)

    def scratch(self, key: str) -> Path:
        """Return a directory for the resume points of an unfinished stage; it outlives a killed run and is
        removed when the result is committed.
        """
        path = self._place(self._scratch, key)
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

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only run in this workspace, and clear away what killed runs left in `tmp/`.

        Raises:
            LockHeld: another process holds it; the message names it. The kernel frees the lock of a process
                that died, however it died.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        holder = self.root / "lock.holder"
        lock = FileLock(self.root / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            try:
                who = holder.read_text().strip()
            except FileNotFoundError:  # it is just starting or just ending
                who = "another process"
            raise LockHeld(
                f"the workspace {self.root} is in use by {who}; wait for that run to end or stop it, or "
                f"give this run another workspace."
            ) from error
        try:
            write_atomic(holder, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            self._collect()
            yield
        finally:
            holder.unlink(missing_ok=True)
            lock.release()

    def _publish(self, building: Path, key: str) -> None:
        place = self._place(self._store, key)
        if self.get(key) is None and place.exists():  # damaged: move it out of the way, never write into it
            os.rename(place, discarded := building.with_name(building.name + "-damaged"))
            shutil.rmtree(discarded, ignore_errors=True)
        try:
            os.rename(building, place)
        except OSError:
            if self.get(key) is None:  # otherwise another process was first, with the same bytes
                raise
        sync_directory(self._store)

    def _collect(self) -> None:
        """Remove builds of processes that are gone; a living process of this host may commit without holding
        the lock.
        """
        for path in self._tmp.glob("*"):
            alive = re.match(rf"{re.escape(_host())}-(\d+)-", path.name)
            if alive is None or not _is_running(int(alive[1])):
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _place(parent: Path, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"'{key}' is not a workspace key")
        return parent / key


def _seal(path: Path, description: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Bring every file to the disk, then the manifest that vouches for them."""
    files, tensors = describe_files(path)
    sync_tree(path)
    manifest = Manifest(
        **{**description, "layers": tuple(description["layers"])},
        provenance=provenance,
        tensors=tensors,
        files=files,
    )
    write_atomic(path / MANIFEST_NAME, manifest.to_bytes())


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z.]", ".", socket.gethostname())


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, under another user
        return True
    return True
