"""The upload of one blob to an OCI registry, in chunks: POST opens a session, PATCH adds a chunk, PUT closes
it with the digest (OCI distribution 1.1, "Pushing a blob in chunks").

Where a connection drops, the registry is asked how far it came, and the upload goes on there; where it has
forgotten the session, the upload starts again.
"""

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from compress.errors import StorageError
from compress.registry.distribution import Distribution, Request
from compress.registry.image import Descriptor
from compress.registry.resuming import PAUSES_S, Dropped
from compress.untrusted.files import open_plain

CHUNK_BYTES = 16 << 20
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_BINARY = "application/octet-stream"


class Upload:
    """One upload. `sent_bytes` are those that the registry has, `hashed_bytes` those that were compared."""

    def __init__(self, client: Distribution, repository: str, blob: Descriptor, reading: BinaryIO) -> None:
        self._client = client
        self._repository = repository
        self._blob = blob
        self._reading = reading
        self._hasher = hashlib.sha256()
        self._hashed_bytes = 0
        self._sent_bytes = 0
        self._location = ""

    def run(self, mount_from: str | None = None) -> None:
        """Send the blob; without a byte where it can be mounted from another repository of the same host.

        Raises:
            Dropped: the connection was lost again and again.
            StorageError: the source is not what the descriptor states, or the registry refuses.
        """
        tries = 0
        while True:
            before = self._sent_bytes
            try:
                if not self._location and self._begin(mount_from):
                    return
                self._send_chunks()
                self._check_source()
                self._finish()
                return
            except Dropped:
                tries = 0 if self._sent_bytes > before else tries
                if tries == len(PAUSES_S):
                    raise
                time.sleep(PAUSES_S[tries])
                self._look_where()  # part of a chunk may have arrived
                tries = 0 if self._sent_bytes > before else tries + 1

    def _begin(self, mount_from: str | None) -> bool:
        """Open a session; return whether none is needed, because the blob was mounted."""
        path = f"/v2/{self._repository}/blobs/uploads/"
        if mount_from is not None:
            path += f"?mount={self._blob.digest}&from={mount_from}"
        response = self._client.send(self._request("POST", path, (201, 202)))
        if response.status_code == 201:
            return True
        self._sent_bytes = 0
        self._location = self._client.location(response)
        return False

    def _send_chunks(self) -> None:
        while chunk := self._read_chunk():
            last = self._sent_bytes + len(chunk) - 1
            headers = {"Content-Type": _BINARY, "Content-Range": f"{self._sent_bytes}-{last}"}
            response = self._client.send(self._request("PATCH", self._location, (202,), chunk, headers))
            self._location = self._client.location(response)
            self._sent_bytes += len(chunk)

    def _read_chunk(self) -> bytes:
        """Return the next chunk to send, and count bytes into the digest that were not counted before."""
        self._reading.seek(self._sent_bytes)
        chunk = self._reading.read(CHUNK_BYTES)
        if self._sent_bytes <= self._hashed_bytes < self._sent_bytes + len(chunk):
            self._hasher.update(chunk[self._hashed_bytes - self._sent_bytes :])
            self._hashed_bytes = self._sent_bytes + len(chunk)
        if self._hashed_bytes > self._blob.size_bytes:
            self._check_source()
        return chunk

    def _check_source(self) -> None:
        found = "sha256:" + self._hasher.hexdigest()
        if self._hashed_bytes == self._blob.size_bytes and found == self._blob.digest:
            return
        with contextlib.suppress(StorageError):
            self._client.send(self._request("DELETE", self._location, (204, 404)))
        raise changed_source(self._blob)

    def _finish(self) -> None:
        mark = "&" if "?" in self._location else "?"
        path = f"{self._location}{mark}digest={self._blob.digest}"
        self._client.send(self._request("PUT", path, (201,), headers={"Content-Type": _BINARY}))

    def _look_where(self) -> None:
        """Find out how far the registry came. Whatever goes wrong here, the upload starts again."""
        if not self._location:
            return
        try:
            response = self._client.send(self._request("GET", self._location, (204,)))
            found = _RANGE.fullmatch(response.headers.get("Range", ""))
            self._location = self._client.location(response)
        except StorageError:
            found = None
        last = int(found[1]) if found else 0
        if last == 0:  # 0-0 is the range of nothing and of one byte, so a new session is safer
            self._location = ""
            self._sent_bytes = 0
        else:
            self._sent_bytes = min(last + 1, self._hashed_bytes)

    def _request(
        self,
        method: str,
        path: str,
        accepted: tuple[int, ...],
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> Request:
        return Request(method, path, self._repository, "pull,push", accepted, headers or {}, body)


def changed_source(blob: Descriptor) -> StorageError:
    """Return the error for a file that is not what it was when it was described."""
    return StorageError(
        f"{blob.title or blob.media_type} has changed since it was described: it is not {blob.digest} any "
        "more. Nothing was pushed."
    )


@contextlib.contextmanager
def open_source(blob: Descriptor, source: Path | bytes, place: str) -> Iterator[BinaryIO]:
    """Yield the bytes of a blob that is to be stored.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        reading: BinaryIO = (
            BytesIO(source) if isinstance(source, bytes) else open_plain(source, follow_links=False)
        )
        with reading:
            yield reading
    except OSError as error:
        raise StorageError(f"the {blob} cannot be stored in {place}: {error.strerror}.") from error
