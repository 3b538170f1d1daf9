"""Connections with limits: a peer gets its share of them, headers are short and must arrive in time, and
a peer that does not read what it is sent is cut off.

uvicorn's connection, by httptools, has none of these limits; a connection that is cut off reaches the
application as a client that has gone.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from compress.serve.clients import network_of
from compress.serve.settings import ServerSettings
from compress.serve.shares import Shares

_MAX_HEADER_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One connection; `connection_class` gives it its limits."""

    settings: ServerSettings
    shares: Shares

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._peer: str | None = None
        self._headers_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, if its peer may have one more."""
        address = transport.get_extra_info("peername")
        peer = network_of(address[0] if isinstance(address, tuple) else None)
        super().connection_made(transport)
        if not self.shares.take(peer):
            transport.abort()
            return
        self._peer = peer
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        for timer in (self._headers_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._peer is not None:
            self.shares.give_back(self._peer)
            self._peer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the peer."""
        if self._peer is None:
            return
        if self._headers_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()
        super().data_received(data)
        if self._headers_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        """Begin a request, whose headers have arrived."""
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
        if self._write_timer is not None and not self.flow.write_paused:
            self._write_timer.cancel()  # that of the last answer; a peer that reads none is paused again
            self._write_timer = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Wait for a peer that does not read, for a limited time."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Go on with a peer that reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle, once its peer has read the last answer."""
        if self.transport.is_closing():
            return
        if not self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        self._expect_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _expect_reading(self) -> None:
        """Start the time in which the peer must read something of what waits for it."""
        if self._write_timer is None:
            num_unread = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(
                self.settings.write_timeout_s, self._check_reading, num_unread
            )

    def _check_reading(self, num_unread: int) -> None:
        """Cut the peer off if it still leaves `num_unread` bytes unread; otherwise it has as long again."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() >= num_unread:
            self.transport.abort()
        elif self.transport.get_write_buffer_size():
            self._expect_reading()

    def _expect_headers(self) -> None:
        self._num_header_bytes = 0
        self._headers_timer = self.loop.call_later(self.settings.body_timeout_s, self.transport.abort)


def connection_class(settings: ServerSettings) -> type[Connection]:
    """Return the class of the connections of one server."""
    shares = Shares(settings.max_connections)
    return type("LimitedConnection", (Connection,), {"settings": settings, "shares": shares})
