"""Blobs between a registry and this machine: every byte is compared with its digest on the way, several blobs
are on the way at once where the registry takes that, and progress counts their bytes.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO, TypeVar

from compress.artifact.manifest import MAX_MANIFEST_BYTES
from compress.context import Progress
from compress.digest import digest_bytes
from compress.errors import StorageError
from compress.registry.image import Descriptor, ImageManifest
from compress.registry.protocol import Registry
from compress.untrusted.files import open_plain

T = TypeVar("T")
R = TypeVar("R")
_CHUNK_BYTES = 1 << 20
_MIB = 1 << 20


class Meter:
    """The bytes of one transfer that are done, shown in MiB; counted by several threads."""

    def __init__(self, progress: Progress, total_bytes: int, note: str) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._note = note
        self._done_bytes = 0
        self._shown_mib = 0
        self._lock = threading.Lock()
        self.stop = threading.Event()
        """Set when a blob of the transfer has failed, so that the others are given up."""

    def add(self, num_bytes: int) -> None:
        """Count bytes, and show them where that makes another MiB.

        Raises:
            StorageError: another blob of the same transfer has failed.
        """
        if self.stop.is_set():
            raise StorageError("the transfer was given up, because another blob failed.")
        with self._lock:
            self._done_bytes += num_bytes
            done_mib = self._done_bytes // _MIB
            if done_mib != self._shown_mib:
                self._shown_mib = done_mib
                self._progress.update(done_mib, self._total_bytes // _MIB, self._note)


def store_image(
    registry: Registry,
    image: ImageManifest,
    config: bytes,
    files: Path,
    *,
    progress: Progress,
    held: Mapping[str, bytes] | None = None,
) -> int:
    """Put what the registry lacks, the manifest last, and return how many blobs that were. Layers are files
    below `files`, but those that `held` has by their title.

    Raises:
        StorageError: a file has changed since it was described, or the registry cannot be written.
    """
    sources: list[tuple[Descriptor, Path | bytes]] = [
        (layer, (held or {}).get(str(layer.title), files / str(layer.title))) for layer in image.layers
    ]
    sources.append((image.config, config))
    # two files of one content are one blob
    distinct = list({blob.digest: (blob, source) for blob, source in sources}.values())
    meter = Meter(progress, sum(blob.size_bytes for blob, _ in distinct), "MiB stored")

    def store(item: tuple[Descriptor, Path | bytes]) -> bool:
        blob, source = item
        missing = not registry.has(blob)
        if missing:
            registry.put(blob, source)
        meter.add(blob.size_bytes)
        return missing

    num_new = sum(_at_once(registry.num_transfers, store, distinct, meter))
    if not registry.has(image.descriptor):
        registry.put(image.descriptor, image.to_bytes())
        num_new += 1
    return num_new


def fetch_files(registry: Registry, image: ImageManifest, directory: Path, *, progress: Progress) -> None:
    """Copy the layers of an image to their titles below a directory. The beginning of a file that lies there,
    from a pull that was killed, is read instead of being fetched again.

    Raises:
        StorageError: a blob is missing or differs from its digest.
    """
    meter = Meter(progress, sum(layer.size_bytes for layer in image.layers), "MiB fetched")
    titles = {str(layer.title) for layer in image.layers}
    for path in [each for each in directory.rglob("*") if each.is_file()]:
        if path.relative_to(directory).as_posix() not in titles:
            path.unlink()
    for layer in image.layers:
        (directory / str(layer.title)).parent.mkdir(parents=True, exist_ok=True)

    def fetch(layer: Descriptor) -> None:
        path = directory / str(layer.title)
        if not os.path.lexists(path):
            with path.open("xb") as sink:
                copy_blob(registry, layer, sink, meter=meter)
        else:
            _finish(registry, layer, path, meter)

    _at_once(registry.num_transfers, fetch, image.layers, meter)


def copy_blob(
    registry: Registry, blob: Descriptor, sink: BinaryIO | None, *, meter: Meter | None = None
) -> None:
    """Stream a blob into the sink, or nowhere, and check it; never more than its size is written.

    Raises:
        StorageError: it is missing or differs from its digest.
    """
    _copy_rest(registry, blob, sink, hashlib.sha256(), 0, meter)


def read_blob(registry: Registry, blob: Descriptor) -> bytes:
    """Return a small blob, checked against its digest.

    Raises:
        StorageError: it is missing, damaged, or larger than a manifest can be.
    """
    if blob.size_bytes > MAX_MANIFEST_BYTES:
        raise StorageError(
            f"the {blob} claims {blob.size_bytes} bytes, too many for a manifest; push the artifact again."
        )
    with registry.get(blob) as stream:
        data = stream.read(blob.size_bytes + 1)
    _check(blob, len(data), digest_bytes(data))
    return data


def _finish(registry: Registry, layer: Descriptor, path: Path, meter: Meter) -> None:
    """Complete a file that a killed pull began; fetch all of it where its beginning is not that of the
    blob.
    """
    hasher = hashlib.sha256()
    begun_bytes = 0
    with open_plain(path, follow_links=False) as reading:
        while begun_bytes < layer.size_bytes and (
            chunk := reading.read(min(_CHUNK_BYTES, layer.size_bytes - begun_bytes))
        ):
            hasher.update(chunk)
            begun_bytes += len(chunk)
            meter.add(len(chunk))
    if begun_bytes == layer.size_bytes and "sha256:" + hasher.hexdigest() == layer.digest:
        with _writing(path, begun_bytes):
            return
    with _writing(path, begun_bytes) as sink:
        try:
            _copy_rest(registry, layer, sink, hasher, begun_bytes, meter)
            return
        except StorageError:
            if begun_bytes == 0:
                raise
    with _writing(path, 0) as sink:
        copy_blob(registry, layer, sink)


def _copy_rest(
    registry: Registry,
    blob: Descriptor,
    sink: BinaryIO | None,
    hasher: "hashlib._Hash",
    size_bytes: int,
    meter: Meter | None,
) -> None:
    """Stream the bytes of a blob from `size_bytes` on; `hasher` has those before."""
    with registry.get(blob) as stream:
        if size_bytes:
            stream.seek(size_bytes)
        while size_bytes <= blob.size_bytes and (
            chunk := stream.read(min(_CHUNK_BYTES, blob.size_bytes + 1 - size_bytes))
        ):
            hasher.update(chunk)
            size_bytes += len(chunk)
            if sink is not None:
                sink.write(chunk[: len(chunk) - max(0, size_bytes - blob.size_bytes)])
            if meter is not None:
                meter.add(len(chunk))
    _check(blob, size_bytes, "sha256:" + hasher.hexdigest())


@contextlib.contextmanager
def _writing(path: Path, position: int) -> Iterator[BinaryIO]:
    """Open a plain file for writing from a position on; later bytes are cut off."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "wb") as sink:
        sink.truncate(position)
        sink.seek(position)
        yield sink


def _at_once(num_threads: int, work: Callable[[T], R], items: Sequence[T], meter: Meter) -> list[R]:
    """Return the results of `work` for all items, done by so many threads; the first error ends the others
    at their next chunk.
    """
    if num_threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for done in as_completed(futures):
                done.result()
        except BaseException:
            meter.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _check(blob: Descriptor, size_bytes: int, digest: str) -> None:
    if size_bytes != blob.size_bytes:
        kind = "longer than" if size_bytes > blob.size_bytes else f"{size_bytes} bytes instead of"
        raise StorageError(
            f"the {blob} is damaged: it is {kind} {blob.size_bytes} bytes; push the artifact again to "
            f"repair it."
        )
    if digest != blob.digest:
        raise StorageError(
            f"the {blob} is damaged: its content has digest {digest}; push the artifact again to repair it."
        )
