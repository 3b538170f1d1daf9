"""A server for each kind of registry on the loopback address, with a relay before it that can cut a
connection: `check_registry_faults` and `check_registry_copies` push to them.

They are servers of other projects where their programs are named (docker-registry, moto, MLflow), else small
servers of the tests. Commands run in processes of their own, forked from one that has imported every client
already, so that a kill comes in a transfer and not in an import.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import huggingface_hub.constants

from compress.errors import CompressError, EnvironmentUnfit
from tests.support import hub_server, mlflow_server, s3_server
from tests.support.registries import DOCKER_REGISTRY, free_port

FORK = multiprocessing.get_context("fork")
START_S = 120.0
LIMIT_S = 240.0
_CLIENTS = ("requests", "boto3", "huggingface_hub.hf_api", "huggingface_hub.errors", "mlflow")
_HUB_TOKEN = "hf_test"


class Proxy:
    """A relay on the loopback address that counts bytes, and cuts a connection after so many of them, once
    for each `arm`.
    """

    def __init__(self, port: int) -> None:
        self._left: Synchronized[int] = FORK.Value("q", -1)
        self._passed: Synchronized[int] = FORK.Value("q", 0)
        self.port = free_port()
        process = FORK.Process(target=self._serve, args=(port,), daemon=True)
        process.start()

    @property
    def num_bytes(self) -> int:
        """The bytes that passed in both directions until now."""
        return self._passed.value

    def arm(self, num_bytes: int) -> None:
        self._left.value = num_bytes

    def disarm(self) -> bool:
        """Return whether a connection was cut since `arm`, and cut none from now on."""
        was_cut = self._left.value < 0
        self._left.value = -1
        return was_cut

    def _serve(self, port: int) -> None:
        listening = socket.create_server(("127.0.0.1", self.port), backlog=128)
        while True:
            near, _ = listening.accept()
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._left.get_lock():
                    self._passed.value += len(data)
                    before = self._left.value
                    cut = 0 <= before < len(data)
                    if before >= 0:
                        self._left.value = -1 if cut else before - len(data)
                sink.sendall(data[:before] if cut else data)
                if cut:
                    break
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class Backend:
    """A kind of registry: what it runs against, its URL, what a process finds in its environment and does
    first, and the relays before its servers. `storage` is the URL of the store, where weights are elsewhere.
    """

    name: str
    server: str
    url: str
    environment: dict[str, str]
    prepare: Callable[[], None] = lambda: None
    proxies: tuple[Proxy, ...] = ()
    storage: str | None = None

    def begin(self) -> None:
        """Make this process one that finds the registry."""
        os.environ.update(self.environment)
        self.prepare()


def import_clients() -> None:
    """Import what the registries import in functions."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    for name in _CLIENTS:
        importlib.import_module(name)


def backends(
    root: Path,
    servers: contextlib.ExitStack,
    *,
    moto: str | None = None,
    mlflow: str | None = None,
    weights: str = "s3",
) -> Iterator[Backend]:
    """Start a server for each kind of registry, which ends with the stack, and yield the kinds. `weights` is
    the kind of registry ("s3" or "oci") where MLflow's models have theirs.
    """
    yield Backend("layout", "directory", f"layout://{root / 'layout'}", {})

    port = free_port()
    config = root / "registry.yml"
    config.write_text(DOCKER_REGISTRY.format(root=root / "docker-registry", port=port))
    servers.enter_context(serving(["docker-registry", "serve", str(config)], port))
    oci = Proxy(port)
    login = {"DOCKER_CONFIG": str(root / "no-login")}
    yield Backend("oci", "docker-registry", f"oci://127.0.0.1:{oci.port}/org", login, proxies=(oci,))

    port = free_port() if moto else in_process(lambda: s3_server.start(s3_server.Store()))
    if moto is not None:
        servers.enter_context(serving([moto, "-H", "127.0.0.1", "-p", str(port)], port))
    s3 = Proxy(port)
    account = s3_server.environment(f"http://127.0.0.1:{s3.port}")
    if moto is not None:
        run(lambda: make_bucket(account))
    server = "moto" if moto else "small server of the tests"
    yield Backend("s3", server, f"s3://{s3_server.BUCKET}/a", account, proxies=(s3,))

    yield mlflow_backend(root, servers, mlflow, {"oci": (oci, login), "s3": (s3, account)}[weights], weights)

    hub = Proxy(in_process(lambda: hub_server.start(hub_server.Hub())))
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    yield Backend(
        "hf",
        "small server of the tests",
        "hf://owner",
        {**place, "HF_TOKEN": _HUB_TOKEN},
        lambda: use_hub(hub.port, root),
        (hub,),
    )


def mlflow_backend(
    root: Path,
    servers: contextlib.ExitStack,
    program: str | None,
    store: tuple[Proxy, dict[str, str]],
    weights: str,
) -> Backend:
    """Start an MLflow server with its SQLite store, and return the kind of registry that has its weights in
    another.
    """
    port = free_port() if program else in_process(lambda: mlflow_server.start(mlflow_server.Tracking()))
    if program is not None:
        database = ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--workers", "2"]
        artifacts = ["--artifacts-destination", str(root / "mlflow-artifacts")]
        command = [program, "server", "--host", "127.0.0.1", "--port", str(port), *database, *artifacts]
        servers.enter_context(serving(command, port))
    tracking = Proxy(port)
    proxy, environment = store
    place = f"oci://127.0.0.1:{proxy.port}/weights" if weights == "oci" else f"s3://{s3_server.BUCKET}/b"
    return Backend(
        "mlflow",
        f"{'mlflow, SQLite' if program else 'small server of the tests'}; weights in {weights}",
        f"mlflow+http://127.0.0.1:{tracking.port}/{place}",
        {**environment, "MLFLOW_DISABLE_TELEMETRY": "true"},
        proxies=(tracking, proxy),
        storage=place,
    )


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server while the block lasts, which begins when it accepts connections."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise EnvironmentUnfit(f"{command[0]} did not start within {START_S} s.")
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    """Return whether something accepts connections on a port of the loopback address."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def in_process(start: Callable[[], str]) -> int:
    """Serve in a process of its own, which ends with this one; return the port."""
    ours, theirs = FORK.Pipe()

    def serve() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        theirs.send(start())
        signal.pause()

    FORK.Process(target=serve, daemon=True).start()
    return int(ours.recv().rpartition(":")[2])


def make_bucket(account: dict[str, str]) -> None:
    """Make the bucket of the tests in an S3 server."""
    import boto3

    os.environ.update(account)
    boto3.client("s3").create_bucket(Bucket=s3_server.BUCKET)


def use_hub(port: int, root: Path) -> None:
    """Lead the client of the hub, which this process has imported, to a server, with an empty cache."""
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{port}"
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_CACHE = str(root / f"hub-{os.getpid()}")
    constants.HF_HUB_DISABLE_XET = True
    os.environ["HF_TOKEN"] = _HUB_TOKEN


def run(action: Callable[[], None], kill_after_s: float | None = None) -> int | None:
    """Run an action in a process of its own and return its exit code; None where it was killed."""
    process = FORK.Process(target=run_action, args=(action,))
    process.start()
    process.join(LIMIT_S if kill_after_s is None else kill_after_s)
    killed = process.is_alive()
    if killed:
        process.kill()
        process.join()
    return None if killed and kill_after_s is not None else process.exitcode


def run_action(action: Callable[[], None]) -> None:
    """Run an action in this process, and end it with the action's exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        action()
    except CompressError as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)
    os._exit(0)
