"""A registry in a local directory: the OCI image layout 1.1 (image-layout.md of the OCI image specification),
which needs no server.

    oci-layout     {"imageLayoutVersion": "1.0.0"}          blobs/sha256/<hex>   every blob and manifest
    index.json     the manifests, with their tags (index.py)

Blobs are copied, never hard-linked: a program that later truncates and rewrites the source in place would
damage the registry through the link. `index.json` is replaced in one step under a file lock.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from compress.artifact.atomic import atomic_file
from compress.artifact.disk import write_error
from compress.artifact.manifest import MAX_MANIFEST_BYTES
from compress.digest import digest_file
from compress.errors import LockHeld, StorageError, UnsupportedFormat, UsageError
from compress.registry.image import Descriptor
from compress.registry.index import ImageIndex
from compress.registry.protocol import REGISTRIES, Tag
from compress.untrusted.files import open_plain
from compress.untrusted.parse import Malformed, read_json

_CHUNK_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 60.0  # the lock is held for one read and one write of index.json, milliseconds
_STALE_S = 24 * 3600.0  # a temporary file that nobody wrote to for a day belongs to a killed push


class Layout:
    """The registry in one directory; created by the first push."""

    num_transfers = 1

    def __init__(self, root: Path) -> None:
        self.root = root

    def repository(self, name: str) -> "Layout":
        del name  # a blob is stored once for all names
        return self

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
        return self._index().find(digest)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        return self._index().read_tag(name, tag)

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        with self._locked():
            self._write(self._index().with_tags(name, tags, manifest))
            self._collect()

    def write_tag_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> bool:
        with self._locked():
            moved = self._index().with_tags_if(name, tags, manifest, guard=guard, expected=expected)
            if moved is not None:
                self._write(moved)
                self._collect()
        return moved is not None

    def tags(self) -> tuple[Tag, ...]:
        return self._index().tags()

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        with self._locked():
            self._write(self._index().with_attached(manifest, subject))

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        return self._index().attached(subject)

    def _blob(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

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

    def _index(self) -> ImageIndex:
        """Return the index, an empty one when nothing was pushed yet."""
        path = self.root / "index.json"
        try:
            layout = read_json(self.root / "oci-layout", max_bytes=1 << 20)
            if not isinstance(layout, dict) or "imageLayoutVersion" not in layout:
                raise Malformed("oci-layout states no version")
            version = str(layout["imageLayoutVersion"])
            if path.exists():
                index = ImageIndex.from_json(read_json(path, max_bytes=MAX_MANIFEST_BYTES), str(path))
            else:
                index = ImageIndex.empty(str(path))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                f"there is no registry at {self.root} (no oci-layout file); the first push creates one."
            ) from error
        except (OSError, Malformed) as error:
            raise StorageError(
                f"the registry at {self.root} is damaged: its oci-layout or index.json cannot be read "
                f"({error})."
            ) from error
        if not version.startswith("1."):
            raise UnsupportedFormat(
                f"the registry at {self.root} is an OCI image layout of version {version}; version 1 is "
                f"read here."
            )
        return index

    def _write(self, index: ImageIndex) -> None:
        self._replace("index.json", index.to_bytes())

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
