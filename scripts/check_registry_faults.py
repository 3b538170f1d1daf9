"""Kills pushes and pulls, and cuts their connections, at random moments, in every kind of registry; then lets
many push to one tag at once. Nothing that can be seen may ever be half an artifact.

    python -m scripts.check_registry_faults --seed 0 --out benchmarks/registry-faults.json \\
        --moto .venv-registries/bin/moto_server --mlflow .venv-registries/bin/mlflow

After each injection the tag must name the artifact from before or the new one, whole, and the destination of
a pull must not exist or be whole; then the same command must finish undisturbed with the right digest. Blobs
are 6 MiB, sent in chunks of 1 MiB (S3: in parts of 5 MiB). A fault that comes when the command has ended is
not counted. Needs docker-registry; without --moto and --mlflow small servers of the tests take their place,
and the result file says so. The hub is always such a server. Exit code 1 if anything differs.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch

from compress.artifact.manifest import open_artifact, verify_artifact
from compress.artifact.workspace import ArtifactWriter, Workspace
from compress.errors import CompressError, LockHeld
from compress.registry import s3, upload
from compress.registry.protocol import open_registry
from compress.registry.transfer import pull, push, verify
from scripts.bench_setup import markdown, write_results
from tests.support import hub_server, mlflow_server, s3_server
from tests.support.registries import DOCKER_REGISTRY, free_port

FORK = multiprocessing.get_context("fork")
BLOB_BYTES = 6 << 20
CHUNK_BYTES, PART_BYTES = 1 << 20, 5 << 20
NAME = "model"
TAG = "shared"
CORRUPT = 3
NUM_PUSHERS = 8
START_S = 120.0
LIMIT_S = 240.0


class Proxy:
    """A relay on the loopback address that cuts a connection after so many bytes, once for each `arm`."""

    def __init__(self, port: int) -> None:
        self._left: Synchronized[int] = FORK.Value("q", -1)
        self.port = free_port()
        process = FORK.Process(target=self._serve, args=(port,), daemon=True)
        process.start()

    def arm(self, num_bytes: int) -> None:
        self._left.value = num_bytes

    def disarm(self) -> bool:
        """Return whether a connection was cut."""
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
    """A kind of registry: what it runs against, its URL, what a process does first, and its relay."""

    name: str
    server: str
    url: str
    prepare: Callable[[], None] = lambda: None
    proxy: Proxy | None = None


@dataclass
class Tally:
    """What became of the injections into one command of one registry."""

    backend: str
    server: str
    command: str
    fault: str
    injected: int = 0
    survived: int = 0
    corrupt: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=16, help="of pushes, and as many of pulls, a registry")
    parser.add_argument("--drops", type=int, default=8, help="in pushes, and as many in pulls, a registry")
    parser.add_argument("--rounds", type=int, default=20, help="of 8 pushers to one tag, a registry")
    parser.add_argument("--hub-rounds", type=int, default=20, help="the same of the hub, which are slower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", action="append", help="only this kind; may be repeated")
    parser.add_argument("--moto", help="the program moto_server")
    parser.add_argument("--mlflow", help="the program mlflow, with its server")
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    upload.CHUNK_BYTES, s3.PART_BYTES = CHUNK_BYTES, PART_BYTES
    rng = random.Random(args.seed)
    tallies: list[Tally] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        root = Path(name)
        for backend in backends(root, args.moto, args.mlflow, servers):
            if args.backend and backend.name not in args.backend:
                continue
            place = root / f"work-{backend.name}"
            tallies += disturb(backend, place, args.kills, args.drops, rng)
            num_rounds = args.hub_rounds if backend.name == "hf" else args.rounds
            rounds.append(compete(backend, place, num_rounds, rng))
            print(rounds[-1], *tallies[-4:], sep="\n", file=sys.stderr, flush=True)
            if args.out is not None:  # what is done stays where a later kind takes too long
                write(args, tallies, rounds)
    print_tables(tallies, rounds)
    return 1 if any(each.corrupt for each in tallies) or any(each["wrong"] for each in rounds) else 0


def write(args: argparse.Namespace, tallies: Sequence["Tally"], rounds: Sequence[dict[str, Any]]) -> None:
    """Write the result file of the kinds that are done."""
    rows = [{"kind": "injection", **vars(each)} for each in tallies]
    facts = {
        "seed": args.seed,
        "injections": sum(each.injected for each in tallies),
        "corrupt": sum(len(each.corrupt) for each in tallies) + sum(each["wrong"] for each in rounds),
        "blob_bytes": BLOB_BYTES,
        "chunk_bytes": CHUNK_BYTES,
    }
    write_results(args.out, [*rows, *rounds], device=torch.device("cpu"), commit=args.commit, facts=facts)


def backends(
    root: Path, moto: str | None, mlflow: str | None, servers: contextlib.ExitStack
) -> Iterator[Backend]:
    """Start a server for each kind of registry, which ends with the stack, and yield the kinds."""
    yield Backend("layout", "directory", f"layout://{root / 'layout'}")

    port = free_port()
    config = root / "registry.yml"
    config.write_text(DOCKER_REGISTRY.format(root=root / "docker-registry", port=port))
    servers.enter_context(serving(["docker-registry", "serve", str(config)], port))
    proxy = Proxy(port)
    yield Backend("oci", "docker-registry", f"oci://127.0.0.1:{proxy.port}/org", proxy=proxy)

    if moto is not None:
        port = free_port()
        servers.enter_context(serving([moto, "-H", "127.0.0.1", "-p", str(port)], port))
    else:
        port = in_process(lambda: s3_server.start(s3_server.Store()))
    s3_proxy = Proxy(port)
    storage = s3_server.environment(f"http://127.0.0.1:{s3_proxy.port}")
    if moto is not None:
        run(lambda: make_bucket(storage))
    server = "moto" if moto else "small server of the tests"
    yield Backend("s3", server, f"s3://{s3_server.BUCKET}/a", lambda: os.environ.update(storage), s3_proxy)

    if mlflow is not None:
        port = free_port()
        store = ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--workers", "2"]
        artifacts = ["--artifacts-destination", str(root / "mlflow-artifacts")]
        command = [mlflow, "server", "--host", "127.0.0.1", "--port", str(port), *store, *artifacts]
        servers.enter_context(serving(command, port))
    else:
        port = in_process(lambda: mlflow_server.start(mlflow_server.Tracking()))
    ml_proxy = Proxy(port)
    server = "mlflow, SQLite" if mlflow else "small server of the tests"
    url = f"mlflow+http://127.0.0.1:{ml_proxy.port}/s3://{s3_server.BUCKET}/b"
    yield Backend("mlflow", server, url, lambda: os.environ.update(storage), ml_proxy)

    hub_proxy = Proxy(in_process(lambda: hub_server.start(hub_server.Hub())))
    yield Backend(
        "hf", "small server of the tests", "hf://owner", lambda: use_hub(hub_proxy.port, root), hub_proxy
    )


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server while the block lasts, which begins when it accepts connections."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_process(start: Callable[[], str]) -> int:
    """Serve in a process of its own, which ends with this one; return the port."""
    ours, theirs = FORK.Pipe()

    def serve() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        theirs.send(start())
        signal.pause()

    FORK.Process(target=serve, daemon=True).start()
    return int(ours.recv().rpartition(":")[2])


def make_bucket(storage: dict[str, str]) -> None:
    import boto3

    os.environ.update(storage)
    boto3.client("s3").create_bucket(Bucket=s3_server.BUCKET)


def use_hub(port: int, root: Path) -> None:
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{port}"
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_CACHE = str(root / f"hub-{os.getpid()}")
    constants.HF_HUB_DISABLE_XET = True
    os.environ["HF_TOKEN"] = "hf_test"


def make_artifact(place: Path, seed: int, num_bytes: int = BLOB_BYTES) -> Path:
    """Return an artifact of random bytes, in the workspace of a place."""

    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(random.Random(seed).randbytes(num_bytes))
        (writer.path / "more.bin").write_bytes(hashlib.sha256(str(seed).encode()).digest() * 5000)
        (writer.path / "config.json").write_text(f'{{"seed": {seed}}}')
        writer.describe(role="checkpoint")

    key = Workspace.key("fault", 1, {}, {}, seed)
    return Workspace(place / "workspace").commit(key, "fault", {}, build).path


def run(action: Callable[[], None], kill_after_s: float | None = None) -> int | None:
    """Run an action in a process of its own and return its exit code; None where it was killed."""
    process = FORK.Process(target=_run, args=(action,))
    process.start()
    process.join(LIMIT_S if kill_after_s is None else kill_after_s)
    killed = process.is_alive()
    if killed:
        process.kill()
        process.join()
    return None if killed and kill_after_s is not None else process.exitcode


def _run(action: Callable[[], None]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        action()
    except CompressError as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)
    os._exit(0)


def disturb(backend: Backend, place: Path, num_kills: int, num_drops: int, rng: random.Random) -> list[Tally]:
    """Inject faults into pushes and pulls of one registry."""
    current = make_artifact(place, rng.getrandbits(40))
    began = time.monotonic()
    assert run(lambda: push_to(backend, current)) == 0, f"an undisturbed push to {backend.name} failed"
    push_s = time.monotonic() - began
    began = time.monotonic()
    assert run(lambda: pull_from(backend, place / "undisturbed")) == 0
    pull_s = time.monotonic() - began
    tallies = []
    for fault, count in (("kill", num_kills), ("drop", num_drops if backend.proxy else 0)):
        pushes = Tally(backend.name, backend.server, "push", fault)
        for _ in range(count):
            new = make_artifact(place, rng.getrandbits(40))
            code = inject(backend, partial(push_to, backend, new), fault, push_s, rng)
            pushes.injected += code != -1
            pushes.survived += code == 0
            digests = {open_artifact(each).digest for each in (current, new)}
            note(pushes, run(partial(look, backend, digests)), "after a fault")
            note(pushes, run(partial(push_to, backend, new)), "the next push")
            note(pushes, run(partial(look, backend, {open_artifact(new).digest})), "after it")
            shutil.rmtree(current, ignore_errors=True)
            current = new
        pulls = Tally(backend.name, backend.server, "pull", fault)
        for number in range(count):
            target = place / f"{fault}-{number}"
            code = inject(backend, partial(pull_from, backend, target), fault, pull_s, rng)
            pulls.injected += code != -1
            pulls.survived += code == 0
            digest = open_artifact(current).digest
            if target.exists():
                note(pulls, run(partial(compare, target, digest)), "after a fault")
            else:
                note(pulls, run(partial(pull_from, backend, target)), "the next pull")
                note(pulls, run(partial(compare, target, digest)), "after it")
            shutil.rmtree(target, ignore_errors=True)
        tallies += [pushes, pulls] if count else []
    return tallies


def inject(
    backend: Backend, action: Callable[[], None], fault: str, usual_s: float, rng: random.Random
) -> int | None:
    """Run an action with one fault; return its exit code, None where it was killed, -1 where the fault came
    too late to be one.
    """
    if fault == "kill":
        code = run(action, rng.uniform(0, 0.8 * usual_s))
        return -1 if code is not None else None
    assert backend.proxy is not None
    backend.proxy.arm(rng.randrange(0, BLOB_BYTES))
    code = run(action)
    return code if backend.proxy.disarm() else -1


def push_to(backend: Backend, path: Path) -> None:
    backend.prepare()
    push(open_registry(backend.url), open_artifact(path), name=NAME, aliases=(TAG,))


def pull_from(backend: Backend, target: Path) -> None:
    backend.prepare()
    pull(f"{backend.url}/{NAME}:{TAG}", target)


def look(backend: Backend, digests: set[str]) -> None:
    """Exit with CORRUPT where the tag names anything but one of these artifacts, whole."""
    backend.prepare()
    if verify(f"{backend.url}/{NAME}:{TAG}").artifact_digest not in digests:
        os._exit(CORRUPT)


def compare(target: Path, digest: str) -> None:
    verify_artifact(open_artifact(target))
    if open_artifact(target).digest != digest:
        os._exit(CORRUPT)


def note(tally: Tally, code: int | None, when: str) -> None:
    if code != 0:
        tally.corrupt.append(f"{when}: exit code {code}")


def compete(backend: Backend, place: Path, num_rounds: int, rng: random.Random) -> dict[str, Any]:
    """Let 8 processes push to one tag at once, and one look at it all the time; return what was wrong."""
    began = time.monotonic()
    wrong: list[str] = []
    num_looks = 0
    known = {verified(backend)}
    for number in range(num_rounds):
        paths = [make_artifact(place, rng.getrandbits(40), 100_000) for _ in range(NUM_PUSHERS)]
        known |= {open_artifact(path).digest for path in paths}
        processes = [FORK.Process(target=_run, args=(partial(patiently, backend, path),)) for path in paths]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            code = run(partial(look, backend, known))
            num_looks += 1
            wrong += [] if code == 0 else [f"round {number}: a look ended with {code}"]
        codes = [process.exitcode for process in processes]
        wrong += [f"round {number}: a push ended with {code}" for code in codes if code != 0]
        code = run(partial(look, backend, {open_artifact(path).digest for path in paths}))
        wrong += [] if code == 0 else [f"round {number}: the last look ended with {code}"]
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    return {
        "kind": "concurrency",
        "backend": backend.name,
        "server": backend.server,
        "pushers": NUM_PUSHERS,
        "rounds": num_rounds,
        "looks": num_looks,
        "wrong": len(wrong),
        "sentences": wrong[:20],
        "seconds": round(time.monotonic() - began, 1),
    }


def patiently(backend: Backend, path: Path) -> None:
    """Push; again where others had the index each time, as exit code 75 asks for."""
    for _ in range(5):
        try:
            push_to(backend, path)
            return
        except LockHeld:
            continue
    push_to(backend, path)


def verified(backend: Backend) -> str:
    """Return the digest of the artifact that the tag names now."""
    ours, theirs = FORK.Pipe()

    def read() -> None:
        backend.prepare()
        theirs.send(verify(f"{backend.url}/{NAME}:{TAG}").artifact_digest)

    run(read)
    return str(ours.recv())


def print_tables(tallies: Sequence[Tally], rounds: Sequence[dict[str, Any]]) -> None:
    print(
        markdown(
            ["registry", "server", "command", "fault", "injected", "went on by itself", "corrupt"],
            [
                [each.backend, each.server, each.command, each.fault, str(each.injected), str(each.survived),
                 str(len(each.corrupt))]
                for each in tallies
            ],
        )
    )  # fmt: skip
    names = ("backend", "server", "pushers", "rounds", "looks", "wrong", "seconds")
    print(markdown(list(names), [[str(each[name]) for name in names] for each in rounds]))
    for each in tallies:
        for sentence in each.corrupt:
            print(f"{each.backend} {each.command}: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
