"""The part of the Hugging Face hub's interface that `hf://` uses, in this process and in memory:
repositories, commits with a parent, large files, and files at a commit.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.quiet_server import QuietServer

LARGE_BYTES = 16 << 10
"""The size above which this hub wants a file as a large one."""


@dataclass
class Repository:
    """Commits in their order, each with all files; `private` as it was made."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.commits[-1][1]
        return next((files for oid, files in self.commits if oid == revision), None)


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[dict[str, str]] = []
        """The headers of every request for a file, with names in lower case."""
        self.files_at: str | None = None
        """Another host, to which a request for a file of an artifact is redirected."""
        self.lock = threading.Lock()

    def create(self, name: str, *, private: bool) -> bool:
        with self.lock:
            if name in self.repositories:
                return False
            self.repositories[name] = Repository(private)
            self.commit(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, [])
            return True

    def commit(self, name: str, added: dict[str, bytes], deleted: list[str]) -> str:
        commits = self.repositories[name].commits
        files = {**(commits[-1][1] if commits else {}), **added}
        for path in deleted:
            files.pop(path, None)
        oid = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits.append((oid, files))
        return oid


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            self._json(200, {"name": "test", "type": "user"})
        elif parts == ["api", "models"]:
            self._json(200, [{"id": name} for name in sorted(self.hub.repositories)])
        elif parts[:2] == ["api", "models"]:
            self._of_repository("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self._body()
        self._json(200, {})

    def do_POST(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self._body()
        if parts == ["api", "repos", "create"]:
            fields = json.loads(body)
            name = f"{fields['organization']}/{fields['name']}"
            private = bool(fields.get("private")) or fields.get("visibility") == "private"
            made = self.hub.create(name, private=private)
            self._json(200 if made else 409, {"url": f"{self._home()}/{name}", "error": "exists"})
        elif parts[-1] == "batch":
            self._json(200, {"transfer": "basic", "objects": self._uploads(json.loads(body))})
        elif parts[4:5] == ["preupload"]:
            files = json.loads(body)["files"]
            self._json(
                200, {"files": [{**each, "uploadMode": _mode(each), "shouldIgnore": False} for each in files]}
            )
        elif parts[4:5] == ["commit"]:
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines() if line])
        else:
            self._json(200, {})  # verification of a large file

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        added, deleted, parent = {}, [], None
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                parent = value.get("parentCommit")
            elif line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                deleted.append(value["path"])
        with self.hub.lock:
            head = self.hub.repositories[name].commits[-1][0]
            if parent is not None and parent != head:
                self._json(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            oid = self.hub.commit(name, added, deleted)
        self._json(
            200, {"commitUrl": f"{self._home()}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        )

    def _uploads(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {**each}
            if each["oid"] in self.hub.large
            else {**each, "actions": {"upload": {"href": f"{self._home()}/large/{each['oid']}"}}}
            for each in fields["objects"]
        ]

    def _of_repository(self, name: str, rest: list[str]) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound")
            return
        files = repository.at(rest[1] if len(rest) > 1 else "main") or {}
        if rest[:1] == ["tree"]:
            rows = [
                {"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files.items()
            ]
            self._json(200, rows)
        else:
            siblings = [{"rfilename": path} for path in files]
            self._json(200, {"id": name, "sha": repository.commits[-1][0], "siblings": siblings})

    def _file(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        files = repository.at(revision) if repository else None
        if repository is None or files is None:
            self._missing("RepoNotFound" if repository is None else "RevisionNotFound")
            return
        if path not in files:
            self._missing("EntryNotFound", {"X-Repo-Commit": revision})
            return
        data = files[path]
        self.hub.requests.append({name.lower(): value for name, value in self.headers.items()})
        elsewhere = self.hub.files_at
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        commit = repository.commits[-1][0] if revision == "main" else revision
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if elsewhere and not path.startswith(".") and self.headers["Host"] not in elsewhere:
            linked = {"X-Linked-ETag": etag, "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit}
            self._answer(302, b"", {**linked, "Location": f"{elsewhere}{self.path}"})
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(206 if start else 200, data[start:], headers)

    def _missing(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._answer(404, b'{"error": "not found"}', {"X-Error-Code": code, **(headers or {})})

    def _json(self, status: int, document: Any) -> None:
        self._answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _home(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def start(hub: Hub) -> str:
    """Serve on a free port of the loopback address while this process runs; return the URL."""
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["size"] > LARGE_BYTES else "regular"
