"""A registry in a local directory: the OCI image layout 1.1 (image-layout.md of the OCI image specification),
which needs no server.

    oci-layout     {"imageLayoutVersion": "1.0.0"}          blobs/sha256/<hex>   every blob and manifest
    index.json     the manifests; a tag is an entry whose annotation `org.opencontainers.image.ref.name` is
    `name:tag`

Blobs are copied, never hard-linked: a program that later truncates and rewrites the source in place would
damage the registry through the link. `index.json` is replaced in one step under a file lock. When a tag
moves, the manifest it left stays listed without a name: a way back.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from compress.artifact.atomic import atomic_file
from compress.artifact.disk import write_error
from compress.artifact.manifest import MAX_MANIFEST_BYTES
from compress.digest import digest_file
from compress.errors import LockHeld, StorageError, UnsupportedFormat, UsageError
from compress.registry.image import IMAGE_INDEX, REF_NAME, SUBJECT, Descriptor
from compress.registry.protocol import REGISTRIES, Tag
from compress.registry.ref import check_name, check_tag
from compress.untrusted.files import open_plain
from compress.untrusted.parse import Malformed, read_json

_CHUNK_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 60.0  # the lock is held for one read and one write of index.json, milliseconds
_STALE_S = 24 * 3600.0  # a temporary file that nobody wrote to for a day belongs to a killed push


class Layout:
    """The registry in one directory; created by the first push."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, blob: Descriptor) -> bool:
        """Return whether the blob is there and whole. It is read (about 1.5 GB/s), so that pushing again
        repairs a damaged one.
        """
        path = self._blob(blob.digest)
        if path.is_symlink() or not path.is_file() or path.stat().st_size != blob.size_bytes:
            return False
        return digest_file(path) == blob.digest

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        self._create()
        try:
            reading: BinaryIO = (
                BytesIO(source) if isinstance(source, bytes) else open_plain(source, follow_links=False)
            )
            with reading, atomic_file(self._blob(blob.digest), temporary_directory=self._temporary()) as sink:
                hasher = hashlib.sha256()
                size_bytes = 0
                while chunk := reading.read(_CHUNK_BYTES):
                    hasher.update(chunk)
                    size_bytes += len(chunk)
                    sink.write(chunk)
                if size_bytes != blob.size_bytes or "sha256:" + hasher.hexdigest() != blob.digest:
                    origin = blob.title or blob.media_type
                    raise StorageError(
                        f"{origin} has changed since it was described: it is not {blob.digest} any more. "
                        f"Nothing was pushed."
                    )
        except OSError as error:
            raise write_error(error, path=self.root) or StorageError(
                f"the {blob} cannot be stored in {self.root}: {error.strerror}.", where=self.root
            ) from error

    @contextlib.contextmanager
    def get(self, blob: Descriptor) -> Iterator[BinaryIO]:
        try:
            stream = open_plain(self._blob(blob.digest), follow_links=False)
        except OSError as error:
            raise StorageError(
                f"the {blob} cannot be read from {self.root}: {error.strerror}; push the artifact again."
            ) from error
        with stream:
            yield stream

    def find(self, digest: str) -> Descriptor | None:
        return next((self._descriptor(entry) for entry in self._entries() if _digest(entry) == digest), None)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        wanted = f"{name}:{tag}"
        return next(
            (self._descriptor(entry) for entry in self._entries() if _ref_name(entry) == wanted), None
        )

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        with self._locked():
            self._point(name, tags, manifest)

    def write_tag_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> bool:
        with self._locked():
            held = self.read_tag(name, guard)
            if (None if held is None else held.digest) != expected:
                return False
            self._point(name, tags, manifest)
        return True

    def _point(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        """Point tags to a manifest. The caller has the lock."""
        names = [f"{name}:{tag}" for tag in tags]
        entries = [_without_name(entry) if _ref_name(entry) in names else entry for entry in self._entries()]
        entries += [{**manifest.to_json(), "annotations": {REF_NAME: ref_name}} for ref_name in names]
        self._write(entries)
        self._collect()

    def tags(self) -> tuple[Tag, ...]:
        found = []
        for entry in self._entries():
            name, colon, tag = _ref_name(entry).rpartition(":")
            with contextlib.suppress(
                UsageError, StorageError
            ):  # other tools may write entries of other shapes
                if colon:
                    found.append(Tag(check_name(name), check_tag(tag), self._descriptor(entry)))
        return tuple(sorted(found, key=lambda item: (item.name, item.tag)))

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        with self._locked():
            entries = [entry for entry in self._entries() if _digest(entry) != manifest.digest]
            self._write([*entries, {**manifest.to_json(), "annotations": {SUBJECT: subject.digest}}])

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        return tuple(
            self._descriptor(entry)
            for entry in self._entries()
            if _annotations(entry).get(SUBJECT) == subject.digest
        )

    def _blob(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def _descriptor(self, entry: Any) -> Descriptor:
        return Descriptor.from_json(entry, str(self.root / "index.json"))

    def check_place(self) -> None:
        if (self.root / "oci-layout").exists():
            return
        strange = self.root.exists() and (
            not self.root.is_dir() or set(os.listdir(self.root)) - {"blobs", ".tmp"}
        )
        if (
            strange and not (self.root / "oci-layout").exists()
        ):  # looked at again: another first push may have come between
            raise UsageError(
                f"{self.root} is not an OCI image layout and not empty; give a new directory to push to."
            )
        nearest = next(each for each in (self.root, *self.root.absolute().parents) if each.exists())
        if not nearest.is_dir():
            raise UsageError(f"{nearest} is no directory, so no registry can be made at {self.root}.")

    def _create(self) -> None:
        """Make the layout; a directory that holds other things is left alone."""
        self.check_place()
        if (self.root / "oci-layout").exists():
            return
        self._blob("").mkdir(parents=True, exist_ok=True)
        self._replace("oci-layout", b'{"imageLayoutVersion": "1.0.0"}\n')

    def _replace(self, name: str, data: bytes) -> None:
        with atomic_file(self.root / name, temporary_directory=self._temporary()) as stream:
            stream.write(data)

    def _temporary(self) -> Path:
        directory = self.root / ".tmp"
        directory.mkdir(exist_ok=True)
        return directory

    def _entries(self) -> list[Any]:
        """Return the entries of `index.json`, none when nothing was pushed yet. They may have any shape: what
        is not ours is kept as it is, and is an error only where it is asked for."""
        entries: list[Any] = self._index()["manifests"]
        return entries

    def _index(self) -> dict[str, Any]:
        try:
            version = _object(read_json(self.root / "oci-layout", max_bytes=1 << 20))["imageLayoutVersion"]
            path = self.root / "index.json"
            index = (
                _object(read_json(path, max_bytes=MAX_MANIFEST_BYTES))
                if path.exists()
                else {"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": []}
            )
            entries = index["manifests"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                f"there is no registry at {self.root} (no oci-layout file); the first push creates one."
            ) from error
        except (OSError, Malformed, KeyError) as error:
            raise StorageError(
                f"the registry at {self.root} is damaged: its oci-layout or index.json cannot be read "
                f"({error})."
            ) from error
        if not str(version).startswith("1."):
            raise UnsupportedFormat(
                f"the registry at {self.root} is an OCI image layout of version {version}; version 1 is "
                f"read here."
            )
        if not isinstance(entries, list):
            raise StorageError(
                f"the registry at {self.root} is damaged: the manifests in its index.json are no list."
            )
        return dict(index)

    def _write(self, entries: list[Any]) -> None:
        """Replace `index.json`. A manifest without a name is listed once, and only while no other entry lists
        it.
        """
        listed = {_digest(entry) for entry in entries if _annotations(entry)}
        unique = []
        for entry in entries:
            if _annotations(entry) or not _digest(entry) or _digest(entry) not in listed:
                unique.append(entry)
                listed.add(_digest(entry))
        index = {**self._index(), "manifests": unique}
        self._replace("index.json", (json.dumps(index, indent=2) + "\n").encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.root / ".lock", timeout=_LOCK_TIMEOUT_S)
        try:
            lock.acquire()
        except Timeout as error:
            raise LockHeld(
                f"the registry at {self.root} has been locked by another push for {_LOCK_TIMEOUT_S:.0f} s; "
                f"try again."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _collect(self) -> None:
        for path in self._temporary().iterdir():
            with contextlib.suppress(FileNotFoundError):  # its push may just have finished
                if path.stat().st_mtime < time.time() - _STALE_S:
                    path.unlink()


@REGISTRIES.register("layout")
def open_layout(place: str) -> Layout:
    """Return the registry of `layout://place`: a path, relative to the working directory unless it starts
    with `/` or `~`.
    """
    try:
        return Layout(Path(place).expanduser())
    except RuntimeError:  # the home of a user that does not exist
        raise UsageError(
            f"layout://{place} names a home directory that does not exist; write the path in full."
        ) from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("it is not an object")
    return value


def _annotations(entry: Any) -> dict[str, Any]:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return annotations if isinstance(annotations, dict) else {}


def _ref_name(entry: Any) -> str:
    name = _annotations(entry).get(REF_NAME)
    return name if isinstance(name, str) else ""


def _digest(entry: Any) -> str:
    digest = entry.get("digest") if isinstance(entry, dict) else None
    return digest if isinstance(digest, str) else ""


def _without_name(entry: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in _annotations(entry).items() if key != REF_NAME}
    bare = {key: value for key, value in entry.items() if key != "annotations"}
    return {**bare, "annotations": rest} if rest else bare
