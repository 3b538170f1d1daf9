"""A threaded HTTP server that says nothing of connections which tests cut."""

from http.server import ThreadingHTTPServer


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        del request, client_address
