"""A stream over a network that goes on where a dropped connection left it."""

import io
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from compress.errors import StorageError

T = TypeVar("T")
PAUSES_S = (0.1, 0.4, 1.6, 6.4)
"""Seconds before each new try of a request that was dropped."""


class Dropped(StorageError):
    """A connection ended, timed out or was refused for now; the same request may succeed later."""


def persist(attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns; it is called again, after a pause, where a connection drops.

    Raises:
        Dropped: it dropped every time.
    """
    for pause_s in PAUSES_S:
        try:
            return attempt()
        except Dropped:
            time.sleep(pause_s)
    return attempt()


class Source(Protocol):
    """The bytes of a blob from a position on."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, none at the end; raise Dropped where the connection is lost."""
        ...

    def close(self) -> None: ...


class ResumingStream(io.RawIOBase):
    """The bytes of a blob of a known size. `open_at` requests them from a position on; it is called again
    where a connection drops, and gives up after as many tries without a byte as there are pauses.
    """

    def __init__(self, open_at: Callable[[int], Source], size_bytes: int) -> None:
        self._open_at = open_at
        self._size_bytes = size_bytes
        self._position = 0
        self._source: Source | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "only from the start"
        if offset != self._position:
            self._close_source()
            self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer only at the end.

        Raises:
            Dropped: the connection is lost and does not come back.
        """
        wanted = self._size_bytes + 1 - self._position if size < 0 else size
        parts = []
        while wanted > 0:
            part = self._read_some(wanted)
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
            self._position += len(part)
        return b"".join(parts)

    def begin(self) -> "ResumingStream":
        """Request the first bytes, so that a blob that is not there is known before it is read."""
        self._source = persist(lambda: self._open_at(0))
        return self

    def close(self) -> None:
        self._close_source()
        super().close()

    def _read_some(self, size: int) -> bytes:
        tries = 0
        while True:
            try:
                if self._source is None:
                    self._source = self._open_at(self._position)
                return self._source.read(size)
            except Dropped:
                self._close_source()
                if tries == len(PAUSES_S):
                    raise
                time.sleep(PAUSES_S[tries])
                tries += 1

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
