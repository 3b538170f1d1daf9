"""A small HTTP/1.1 client on asyncio: one request a connection, and the body as it arrives with the time of
arrival.

The time is taken once for every read of the socket, before anything is parsed: what came in one read came at
one time. Bodies end by chunked encoding (RFC 9112, 7.1), by their length, or by the end of the connection.
Not here: redirects, proxies, compression.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from compress.errors import StorageError, UsageError

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 10
READ_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Address:
    """A server and the path under which its interface begins."""

    host: str
    port: int
    tls: bool
    path: str

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


def parse_address(url: str) -> Address:
    """Return the address of an `http://` or `https://` URL; its path is that of the OpenAI interface, `/v1`
    if the URL has none.

    Raises:
        UsageError: it is no such URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"'{url}' is no URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise UsageError(f"'{url}' is no URL of a server; write it as http://localhost:8000/v1.")
    path = parts.path.rstrip("/").removesuffix("/completions")
    if any(ord(char) <= 32 or ord(char) > 126 for char in path + parts.hostname):
        raise UsageError(f"'{url}' has characters that no URL may have.")
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls, path or "/v1")


class BodyDecoder:
    """Takes the chunked encoding off a body, in whatever pieces it arrives."""

    def __init__(self, length: int | None, *, chunked: bool) -> None:
        self._chunked = chunked
        self._left = None if chunked else length  # bytes of this chunk, or of the body
        self._buffer = b""
        self._in_trailer = False
        self.ended = length == 0 and not chunked

    def feed(self, data: bytes) -> bytes:
        """Return the content in the bytes that have come.

        Raises:
            StorageError: a chunk has no size.
        """
        if self.ended:
            return b""
        if not self._chunked:
            return self._take_plain(data)
        self._buffer += data
        content = bytearray()
        while self._buffer and not self.ended and self._advance(content):
            pass
        return bytes(content)

    def _take_plain(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        taken = data[: self._left]
        self._left -= len(taken)
        self.ended = self._left == 0
        return taken

    def _advance(self, content: bytearray) -> bool:
        """Take one step through the buffer; return whether another may follow."""
        if self._left:
            taken = self._buffer[: self._left]
            content += taken
            self._buffer = self._buffer[len(taken) :]
            self._left -= len(taken)
            return True
        line, end, rest = self._buffer.partition(b"\r\n")
        if not end:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise StorageError("the server's answer has a chunk without a size.")
            return False
        self._buffer = rest
        if self._in_trailer:
            self.ended = not line
            return True
        if not line:  # the end of the chunk before
            return True
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise StorageError(f"the server's answer has a chunk of the size {line[:40]!r}.") from None
        if size < 0:
            raise StorageError(f"the server's answer has a chunk of the size {size}.")
        self._left = size
        self._in_trailer = size == 0
        return True


@dataclass(frozen=True)
class Reply:
    """The head of an answer, and its body as it arrives."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    now: Callable[[], float]

    async def pieces(self) -> AsyncIterator[tuple[bytes, float]]:
        """Yield the content of the body in the pieces in which it arrives, each with its time.

        Raises:
            StorageError: the connection ends before the body, or nothing comes for `READ_TIMEOUT_S`.
        """
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if length is not None and not length.isdecimal():
            raise StorageError(f"the server states {length!r:.40} as the length of its answer.")
        body = BodyDecoder(None if length is None else int(length), chunked=chunked)
        while not body.ended:
            data = await asyncio.wait_for(self.reader.read(READ_BYTES), READ_TIMEOUT_S)
            time_s = self.now()
            if not data:
                if chunked or length is not None:
                    raise StorageError("the server closed the connection before its answer was whole.")
                return
            if content := body.feed(data):
                yield content, time_s

    async def content(self, *, max_bytes: int) -> bytes:
        """Return the whole body, cut after `max_bytes`."""
        whole = b""
        async for data, _ in self.pieces():
            whole += data
            if len(whole) >= max_bytes:
                break
        return whole[:max_bytes]


@asynccontextmanager
async def send(
    address: Address,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    now: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[Reply]:
    """Send a request over a connection of its own and yield the answer; the connection ends with the block.

    Raises:
        StorageError: nothing answers, or the answer is not HTTP.
    """
    host = f"[{address.host}]" if ":" in address.host else address.host
    fields = {
        "Host": f"{host}:{address.port}",
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    try:
        opening = asyncio.open_connection(
            address.host,
            address.port,
            ssl=ssl.create_default_context() if address.tls else None,
            limit=MAX_HEAD_BYTES,
        )
        reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise StorageError(f"nothing answers at {address}: {error or 'no connection in time'}.") from None
    try:
        writer.write(head + body)
        await writer.drain()
        yield await _head(reader, now)
    except (OSError, TimeoutError) as error:
        raise StorageError(
            f"the connection to {address} failed: {error or 'nothing came in time'}."
        ) from None
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader, now: Callable[[], float]) -> Reply:
    try:
        raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_TIMEOUT_S)
    except asyncio.IncompleteReadError:
        raise StorageError("the server closed the connection without an answer.") from None
    except asyncio.LimitOverrunError:
        raise StorageError(
            f"the head of the server's answer is longer than {MAX_HEAD_BYTES:,} bytes."
        ) from None
    first, *rest = raw.decode("latin-1").split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise StorageError(f"the server's answer is not HTTP: it begins with {first!r:.60}.")
    headers = {
        name.strip().lower(): value.strip()
        for name, colon, value in (each.partition(":") for each in rest)
        if colon
    }
    return Reply(int(words[1]), headers, reader, now)
