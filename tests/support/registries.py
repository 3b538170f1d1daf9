"""A place for a registry of each kind, on this machine: a directory, or a server that is started as a process
on the loopback address and ends with this one.
"""

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

import huggingface_hub.constants
import pytest

from tests.support import hub_server, mlflow_server, s3_server

START_S = 60.0
DOCKER_REGISTRY = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def place_of(scheme: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new, empty registry of a kind, which this process finds while `monkeypatch` lasts;
    a scheme that is not known here is one of directories.
    """
    make = PLACES.get(scheme)
    return f"{scheme}://{directory}/place/registry" if make is None else make(directory, monkeypatch)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    command: Sequence[str], port: int, path: str = "/", env: dict[str, str] | None = None
) -> None:
    """Start a server that ends with this process, and return when it answers."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    atexit.register(end_server, process)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"{command[0]} did not answer within {START_S} s")


def end_server(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@functools.cache
def docker_registry() -> str:
    """Return `host:port` of Debian's docker-registry, started once a process."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("needs docker-registry: apt-get install docker-registry")
    port = free_port()
    root = Path(tempfile.mkdtemp(prefix="docker-registry-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    config = root / "config.yml"
    config.write_text(DOCKER_REGISTRY.format(root=root / "data", port=port))
    start_server([program, "serve", str(config)], port, "/v2/")
    return f"127.0.0.1:{port}"


def new_oci(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    del directory, monkeypatch
    return f"oci://{docker_registry()}/t{uuid4().hex[:12]}/registry"


@functools.cache
def s3_endpoint() -> str:
    """Return the URL of a small S3 server in this process."""
    return s3_server.start(s3_server.Store())


def new_s3(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    del directory
    for name, value in s3_server.environment(s3_endpoint()).items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.BUCKET}/t{uuid4().hex[:12]}/registry"


def new_mlflow(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    server = mlflow_server.start(mlflow_server.Tracking())
    return f"mlflow+{server}/{new_s3(directory, monkeypatch)}"


def new_hf(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_hub(hub_server.start(hub_server.Hub()), directory, monkeypatch)
    return "hf://owner"


def use_hub(url: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the client of the hub to a server."""
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(directory / "hub"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_test")


PLACES: dict[str, Callable[[Path, pytest.MonkeyPatch], str]] = {
    "hf": new_hf,
    "mlflow+http": new_mlflow,
    "oci": new_oci,
    "s3": new_s3,
}
SAME_BACKEND = {"oci+http", "s3+http", "mlflow+https"}
"""Schemes that open what another one opens, over another transport."""
