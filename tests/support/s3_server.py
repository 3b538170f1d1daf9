"""A small server of S3's protocol in this process: one bucket in memory, objects, ranges, conditional writes
and uploads in parts. It checks no signatures. `make registries` runs the same tests against moto's server.
"""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.quiet_server import QuietServer

BUCKET = "models"


class Store:
    """The objects of the bucket and the uploads that are not complete, under one lock."""

    def __init__(self, *, honours_conditions: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.honours_conditions = honours_conditions
        self.num_parts_received = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def do_GET(self) -> None:
        key, query = self._target()
        if "list-type" in query:
            start = query.get("prefix", [""])[0]
            keys = [each for each in sorted(self.store.objects) if each.startswith(start)][:1]
            found = "".join(f"<Contents><Key>{escape(each)}</Key></Contents>" for each in keys)
            self._xml(f"<ListBucketResult><KeyCount>{len(keys)}</KeyCount>{found}</ListBucketResult>")
        elif "uploads" in query:
            rows = (
                f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId></Upload>"
                for number, (key, _) in self.store.uploads.items()
            )
            body = "".join(rows)
            self._xml(f"<ListMultipartUploadsResult>{body}</ListMultipartUploadsResult>")
        elif "uploadId" in query:
            _, parts = self.store.uploads[query["uploadId"][0]]
            rows = (
                f"<Part><PartNumber>{number}</PartNumber><ETag>{_etag(data)}</ETag></Part>"
                for number, data in sorted(parts.items())
            )
            self._xml(f"<ListPartsResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListPartsResult>")
        else:
            self._object(key, with_body=True)

    def do_HEAD(self) -> None:
        self._object(self._target()[0], with_body=False)

    def do_PUT(self) -> None:
        key, query = self._target()
        data = self._body()
        with self.store.lock:
            if "uploadId" in query:
                self.store.uploads[query["uploadId"][0]][1][int(query["partNumber"][0])] = data
                self.store.num_parts_received += 1
            elif not self._condition_holds(key):
                self._error(412, "PreconditionFailed")
                return
            else:
                self.store.objects[key] = data
        self._answer(200, b"", {"ETag": _etag(data)})

    def do_POST(self) -> None:
        key, query = self._target()
        self._body()
        with self.store.lock:
            if "uploads" in query:
                number = f"upload{len(self.store.uploads)}"
                self.store.uploads[number] = (key, {})
                result = f"<UploadId>{number}</UploadId>"
                self._xml(f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>")
                return
            found = self.store.uploads.pop(query["uploadId"][0], None)
            if found is None:
                self._error(404, "NoSuchUpload")
                return
            self.store.objects[key] = b"".join(data for _, data in sorted(found[1].items()))
        self._xml("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        _, query = self._target()
        self.store.uploads.pop(query.get("uploadId", [""])[0], None)
        self._answer(204, b"", {})

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _target(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            self._error(404, "NoSuchBucket")
        return key, parse_qs(parts.query, keep_blank_values=True)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _condition_holds(self, key: str) -> bool:
        if not self.store.honours_conditions:
            return True
        found = self.store.objects.get(key)
        wanted = self.headers.get("If-Match")
        if wanted is not None:
            return found is not None and _etag(found) == wanted
        return found is None or self.headers.get("If-None-Match") is None

    def _object(self, key: str, *, with_body: bool) -> None:
        data = self.store.objects.get(key)
        if data is None:
            self._error(404, "NoSuchKey")
            return
        headers = {"ETag": _etag(data)}
        ranged = self.headers.get("Range")
        status, part = 200, data
        if ranged:
            start = int(ranged.removeprefix("bytes=").partition("-")[0])
            if start >= len(data):
                self._error(416, "InvalidRange")
                return
            status, part = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(status, part, headers, with_body=with_body)

    def _xml(self, body: str) -> None:
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._answer(status, body, {"Content-Type": "application/xml"}, with_body=self.command != "HEAD")

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def start(store: Store) -> str:
    """Serve a store on a free port of the loopback address while this process runs; return its URL."""
    handler = type("BoundHandler", (Handler,), {"store": store})
    server = QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def environment(url: str) -> dict[str, str]:
    """Return the variables that lead boto3 to a server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
