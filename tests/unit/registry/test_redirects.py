"""A server that redirects to another host gets nobody's credentials sent there, and no write goes there.
`oci://` is in test_oci.py.
"""

import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.app import main
from compress.registry.protocol import open_registry
from compress.registry.transfer import pull, push
from tests.support import hub_server, mlflow_server, s3_server
from tests.support.quiet_server import QuietServer
from tests.support.registries import use_hub

TOKEN = "the-secret-token"


class Elsewhere(BaseHTTPRequestHandler):
    """Another host, which keeps what is sent to it, and redirects all of it to `target` if there is one."""

    protocol_version = "HTTP/1.1"
    target: str | None = None
    received: list[tuple[str, str, str]]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.received.append((self.command, self.path, str(self.headers)))
        self.send_response(307 if self.target else 404)
        if self.target:
            self.send_header("Location", f"{self.target}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _start(target: str | None = None) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the URL of a host, by another name than that of the servers, and what it receives."""
    received: list[tuple[str, str, str]] = []
    handler = type("BoundElsewhere", (Elsewhere,), {"target": target, "received": received})
    server = QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = "localhost" if target is None else "127.0.0.1"
    return f"http://{host}:{server.server_address[1]}", received


def _artifact(root: Path) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(bytes(100_000))
        writer.describe(role="checkpoint")

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, 0), "test", {}, build)


def test_mlflow_is_not_followed_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    for name, value in s3_server.environment(s3_server.start(s3_server.Store())).items():
        monkeypatch.setenv(name, value)
    tracking = mlflow_server.start(mlflow_server.Tracking())
    store = f"s3://{s3_server.BUCKET}/team"
    push(open_registry(f"mlflow+{tracking}/{store}"), _artifact(tmp_path), name="model")
    other, received = _start()
    there, asked = _start(other)
    assert main(["pull", f"mlflow+{there}/{store}/model", str(tmp_path / "out")]) == 5
    assert main(["push", str(_artifact(tmp_path).path), f"mlflow+{there}/{store}/model:stable"]) == 5
    assert TOKEN not in capsys.readouterr().err
    assert any(TOKEN in headers for _, _, headers in asked)
    assert received == []
    assert not (tmp_path / "out").exists()


def test_s3_is_not_followed_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, received = _start()
    there, asked = _start(other)
    for name, value in s3_server.environment(there).items():
        monkeypatch.setenv(name, value)
    assert main(["pull", "s3://models/team/model", str(tmp_path / "out")]) == 5
    assert main(["push", str(_artifact(tmp_path).path), "s3://models/team/model:stable"]) == 5
    assert "Traceback" not in capsys.readouterr().err
    assert any("Authorization" in headers for _, _, headers in asked)
    assert received == []
    assert not (tmp_path / "out").exists()


def test_the_token_of_the_hub_does_not_follow_a_file_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_server.Hub()
    use_hub(hub_server.start(hub), tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push(open_registry("hf://owner"), _artifact(tmp_path), name="model")
    other = hub_server.start(hub).replace("127.0.0.1", "localhost")  # where the hub has its large files
    hub.files_at = other
    assert pull("hf://owner/model", tmp_path / "out").digest == _artifact(tmp_path).digest
    there = [headers for headers in hub.requests if headers["host"] == other.removeprefix("http://")]
    assert there
    assert not any("authorization" in headers for headers in there)
    assert any(TOKEN in headers.get("authorization", "") for headers in hub.requests)


def test_a_hub_that_sends_a_commit_elsewhere_is_refused_without_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, received = _start()
    there, asked = _start(other)
    use_hub(there, tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["push", str(_artifact(tmp_path).path), "hf://owner/model:stable"]) == 5
    assert main(["pull", "hf://owner/model", str(tmp_path / "out")]) in (2, 5)
    assert TOKEN not in capsys.readouterr().err
    assert any(TOKEN in headers for _, _, headers in asked)
    assert not any(TOKEN in headers for _, _, headers in received)
    assert not (tmp_path / "out").exists()
