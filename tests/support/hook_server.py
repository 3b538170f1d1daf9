"""A webhook on the loopback address that answers what a test wrote, and keeps what it was sent."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.support.quiet_server import QuietServer

Answer = tuple[int, dict[str, str]]
"""A status, and headers."""


@dataclass
class HookServer:
    """The server's address, and the requests that came: path, headers in small letters, body."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextlib.contextmanager
def hook_server(answer: Callable[[int], Answer] = lambda number: (204, {})) -> Iterator[HookServer]:
    """Serve while the block runs; `answer` is given the number of the request, from 0."""
    found = HookServer()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                number = len(found.requests)
                found.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, headers = answer(number)
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    with QuietServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
