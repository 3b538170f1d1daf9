"""The scripts that try registries: a relay cuts where it is told to, what is not whole is seen, and every
extra has a check.
"""

import socket
import threading
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

from compress.artifact.manifest import open_artifact
from scripts import check_extras
from scripts.check_registry_faults import (
    CORRUPT,
    Tally,
    disturb_pull,
    look,
    make_artifact,
    pull_from,
    push_to,
)
from scripts.registry_servers import Backend, Proxy, answers, run


@pytest.fixture
def echo() -> int:
    """The port of a server that answers each connection with the bytes it got."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(near: socket.socket) -> None:
        with near:
            while data := near.recv(1 << 16):
                near.sendall(data)

    def serve() -> None:
        while True:
            threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listening.getsockname()[1])


def _echoed(port: int, data: bytes) -> bytes:
    """Return what comes back until all of it is there or the connection ends."""
    until = time.monotonic() + 60
    while not answers(port) and time.monotonic() < until:
        time.sleep(0.02)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as near:
        near.sendall(data)
        found = b""
        while len(found) < len(data) and (part := near.recv(1 << 16)):
            found += part
        return found


def test_a_relay_counts_bytes_and_cuts_one_connection_where_it_is_told_to(echo: int) -> None:
    proxy = Proxy(echo)
    assert _echoed(proxy.port, b"x" * 1000) == b"x" * 1000
    assert proxy.num_bytes == 2000
    proxy.arm(2001)
    assert _echoed(proxy.port, b"x" * 1000) == b"x" * 1000
    assert not proxy.disarm()
    proxy.arm(1000 + 300)  # all of the way there, and 300 bytes of the way back
    assert _echoed(proxy.port, b"x" * 1000) == b"x" * 300
    assert _echoed(proxy.port, b"x" * 1000) == b"x" * 1000
    assert proxy.disarm()


def test_a_tag_on_another_artifact_and_a_pull_that_is_not_whole_are_seen(tmp_path: Path) -> None:
    backend = Backend("layout", "directory", f"layout://{tmp_path / 'registry'}", {})
    right, other = (make_artifact(tmp_path / "place", seed, num_bytes=1000) for seed in (1, 2))
    assert run(partial(push_to, backend, right)) == 0
    assert run(partial(look, backend, {open_artifact(right).digest})) == 0
    assert run(partial(look, backend, {open_artifact(other).digest})) == CORRUPT
    target = tmp_path / "pulls" / "pulled"
    target.parent.mkdir()
    assert run(partial(pull_from, backend, target)) == 0
    whole, torn = (Tally("layout", "directory", "pull", "kill") for _ in range(2))
    disturb_pull(backend, right, target, whole, None)
    assert whole.corrupt == []
    assert run(partial(pull_from, backend, target)) == 0
    (target / "weights.bin").chmod(0o644)
    (target / "weights.bin").write_bytes(b"torn")
    disturb_pull(backend, right, target, torn, None)
    assert torn.corrupt == ["after it: exit code 5"]


def test_every_extra_has_a_check() -> None:
    project = tomllib.loads((check_extras.ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) <= set(check_extras.EXTRAS)
