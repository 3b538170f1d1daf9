"""A threaded HTTP server that says nothing of connections which tests cut."""

import socket
from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 64

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection that sends the body of an answer at once. Without TCP_NODELAY, the body waits
        up to 40 ms for the client to acknowledge the header."""
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        del request, client_address
