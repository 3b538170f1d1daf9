"""A server of the OCI distribution API 1.1 in this process, which does what a test tells it to: drops
connections, asks for credentials, redirects, and gives bytes that are not those that were pushed.
"""

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from compress.digest import digest_bytes
from tests.support.quiet_server import QuietServer


@dataclass
class Oci:
    """The state of a server, and its misbehaviour."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    has_referrers: bool = True
    user: str | None = None
    """`user:password` that is wanted, by a token where `with_tokens`."""
    with_tokens: bool = False
    drop_after: int | None = None
    """Bytes of a body after which a connection is closed; once for each request."""
    num_drops: int = 0
    redirect: str | None = None
    """Where a GET of a blob is redirected to."""
    upload_host: str = ""
    tamper: Callable[[str, bytes], bytes] = lambda path, data: data
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    oci: Oci

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not self._authorized(parts.path):
            return
        kind, name = self._target(parts.path)
        if parts.path == "/v2/":
            self._answer(200, b"{}")
        elif parts.path == "/token":
            self._answer(200, json.dumps({"token": "the-token"}).encode())
        elif kind == "blobs":
            self._blob(name)
        elif kind == "manifests" and name in self.oci.manifests:
            media_type, data = self.oci.manifests[name]
            stated = {"Docker-Content-Digest": digest_bytes(data), "Content-Type": media_type}
            self._answer(200, self.oci.tamper(self.path, data), stated)
        elif kind == "referrers" and self.oci.has_referrers:
            self._answer(200, json.dumps({"manifests": self._referrers(name)}).encode())
        elif kind == "uploads" and name in self.oci.uploads:
            last = max(0, len(self.oci.uploads[name]) - 1)
            self._answer(204, b"", {"Range": f"0-{last}", "Location": self.path})
        elif kind == "tags":
            tags = [each for each in self.oci.manifests if ":" not in each]
            self._answer(200, json.dumps({"tags": tags}).encode())
        else:
            self._answer(404, b"{}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        if not self._authorized(self.path):
            return
        name = uuid4().hex
        self.oci.uploads[name] = body
        location = f"{self.oci.upload_host}{urlsplit(self.path).path}{name}?state=1"
        self._answer(202, b"", {"Location": location})

    def do_PATCH(self) -> None:
        _, name = self._target(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length", 0))
        if self._drops():
            self.oci.uploads[name] += self.rfile.read(min(length, self.oci.drop_after or 0))
            self.close_connection = True
            self.connection.close()
            return
        start = int(self.headers["Content-Range"].partition("-")[0])
        data = self.rfile.read(length)
        assert start == len(self.oci.uploads[name]), "a chunk in the wrong place"
        self.oci.uploads[name] += data
        self._answer(202, b"", {"Location": self.path, "Range": f"0-{len(self.oci.uploads[name]) - 1}"})

    def do_PUT(self) -> None:
        body = self._body()
        if not self._authorized(self.path):
            return
        parts = urlsplit(self.path)
        kind, name = self._target(parts.path)
        if kind == "manifests":
            for each in (name, digest_bytes(body)):
                self.oci.manifests[each] = (self.headers["Content-Type"], body)
            self._answer(201, b"")
            return
        data = self.oci.uploads.pop(name) + body
        wanted = parse_qs(parts.query)["digest"][0]
        if digest_bytes(data) == wanted:
            self.oci.blobs[wanted] = data
        self._answer(201 if digest_bytes(data) == wanted else 400, b"{}")

    def do_DELETE(self) -> None:
        self.oci.uploads.pop(self._target(urlsplit(self.path).path)[1], None)
        self._answer(204, b"")

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _target(self, path: str) -> tuple[str, str]:
        parts = path.strip("/").split("/")
        return (parts[-2], parts[-1]) if len(parts) > 2 else ("", "")

    def _authorized(self, path: str) -> bool:
        self.oci.requests.append((self.command, self.path, dict(self.headers)))
        if self.oci.user is None:
            return True
        basic = "Basic " + base64.b64encode(self.oci.user.encode()).decode()
        wanted = "Bearer the-token" if self.oci.with_tokens and path != "/token" else basic
        if self.headers.get("Authorization") == wanted:
            return True
        realm = f'realm="http://{self.headers["Host"]}/token",service="test"'
        challenge = f"Bearer {realm}" if self.oci.with_tokens else 'Basic realm="test"'
        self._answer(401, b"{}", {"WWW-Authenticate": challenge})
        return False

    def _blob(self, digest: str) -> None:
        data = self.oci.blobs.get(digest)
        if data is None:
            self._answer(404, b"{}")
        elif self.oci.redirect is not None and self.command == "GET":
            self._answer(307, b"", {"Location": f"{self.oci.redirect}{self.path}"})
        elif self.command == "HEAD":
            self._answer(200, data)
        else:
            data = self.oci.tamper(self.path, data)
            ranged = self.headers.get("Range")
            start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
            headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if ranged else {}
            self._answer(206 if ranged else 200, data[start:], headers)

    def _referrers(self, subject: str) -> list[dict[str, object]]:
        found = []
        for digest, (media_type, data) in reversed(self.oci.manifests.items()):
            document = json.loads(data)
            if ":" in digest and (document.get("subject") or {}).get("digest") == subject:
                row = {"mediaType": media_type, "digest": digest, "size": len(data)}
                found.append({**row, "artifactType": document.get("artifactType")})
        return found

    def _drops(self) -> bool:
        with self.oci.lock:  # several requests at a time count down
            if self.oci.drop_after is None or self.oci.num_drops == 0:
                return False
            self.oci.num_drops -= 1
            return True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) > (self.oci.drop_after or 0) and "/blobs/" in self.path and self._drops():
            self.wfile.write(body[: self.oci.drop_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)


def start(oci: Oci) -> str:
    """Serve on a free port of the loopback address while this process runs; return `host:port`."""
    handler = type("BoundHandler", (Handler,), {"oci": oci})
    server = QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"
