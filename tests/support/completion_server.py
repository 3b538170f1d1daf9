"""A small server of the OpenAI completions interface that plays what a test wrote."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.quiet_server import QuietServer


@dataclass(frozen=True)
class Answer:
    """One answer: `counts` are the tokens of each event, `delay_s` the wait before each.

    `stated`: every event has the usage so far. `usage`: the last event has that of the request. `cut`: the
    connection ends after so many events.
    """

    counts: tuple[int, ...]
    delay_s: float = 0.0
    status: int = 200
    stated: bool = True
    usage: bool = True
    cut: int | None = None
    error: str = ""
    cached_tokens: int = 0


Script = Callable[[int, dict[str, Any]], Answer]
"""A function of the number of the request and its body: the answer."""


@dataclass
class CompletionServer:
    """The server's address and what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    probes: list[dict[str, Any]] = field(default_factory=list)
    """Requests with a prompt of one token, by which a client finds out what the server takes."""


def one_by_one(num: int, body: dict[str, Any]) -> Answer:
    """Answer with as many tokens as asked, one an event."""
    return Answer((1,) * body["max_tokens"])


@contextmanager
def completion_server(
    script: Script = one_by_one, *, takes_stated: bool = True
) -> Iterator[CompletionServer]:
    """Serve on a free port of this machine while the block runs. Without `takes_stated` a request for the
    usage with every chunk is refused.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            content = json.dumps({"object": "list", "data": [{"id": "scripted"}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_probe = len(body["prompt"]) == 1
            with lock:
                num = len(found.bodies)
                (found.probes if is_probe else found.bodies).append(body)
                found.headers.append(dict(self.headers))
                found.open_now += 1
                found.most_open = max(found.most_open, found.open_now)
            answer = Answer((1,)) if is_probe else script(num, body)
            if not takes_stated and "continuous_usage_stats" in body["stream_options"]:
                answer = Answer((), status=400)
            if answer.status != 200:
                content = json.dumps({"error": {"message": "not now"}}).encode()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self._close_one()
                self.wfile.write(content)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for idx, event in enumerate(events(answer, len(body["prompt"]))):
                if idx == answer.cut:
                    self._close_one()
                    self.close_connection = True
                    return
                if event == "data: [DONE]":
                    self._close_one()  # before the client can see the end
                time.sleep(answer.delay_s)
                self._chunk(f"{event}\n\n".encode())
            self._chunk(b"")

        def _chunk(self, content: bytes) -> None:
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
            self.wfile.flush()

        def _close_one(self) -> None:
            with lock:
                found.open_now -= 1

    server = QuietServer(("127.0.0.1", 0), Handler)
    found = CompletionServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(answer: Answer, prompt_tokens: int) -> Iterator[str]:
    """Yield the events of an answer, each without its empty line."""
    sum_tokens = 0
    for idx, count in enumerate(answer.counts):
        sum_tokens += count
        last = idx == len(answer.counts) - 1
        choice = {"index": 0, "text": "x" * count, "finish_reason": "length" if last else None}
        usage = {"usage": _usage(prompt_tokens, sum_tokens, answer)} if answer.stated else {}
        yield "data: " + json.dumps({"id": "c", "choices": [choice], **usage})
    if answer.error:
        yield "data: " + json.dumps({"error": {"message": answer.error}})
    if answer.usage:
        yield "data: " + json.dumps({"choices": [], "usage": _usage(prompt_tokens, sum_tokens, answer)})
    yield "data: [DONE]"


def _usage(prompt_tokens: int, completion_tokens: int, answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
