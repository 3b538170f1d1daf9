"""Kills pushes and pulls, and cuts their connections, at random moments, in every kind of registry; then lets
many push to one tag at once. Nothing that can be seen may ever be half an artifact.

    python -m scripts.check_registry_faults --seed 0 --out benchmarks/registry-faults.json \\
        --moto .venv-registries/bin/moto_server --mlflow .venv-registries/bin/mlflow

After each injection the tag must name the artifact from before or the new one, whole, and the destination of
a pull must not exist or be whole; then the same command must finish undisturbed with the right digest. Blobs
are 6 MiB, sent in chunks of 1 MiB (S3: in parts of 5 MiB). A fault that comes when the command has ended is
not counted. Needs docker-registry; without --moto and --mlflow small servers of the tests take their place,
and the result file says so. The hub is always such a server. The weights of MLflow's models are in the S3
server, and its faults are in connections to both. Exit code 1 if anything differs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import open_artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.errors import LockHeld
from compress.registry import s3, upload
from compress.registry.protocol import open_registry
from compress.registry.transfer import pull, push, verify
from scripts.bench_setup import markdown, write_results
from scripts.registry_servers import FORK, Backend, Proxy, backends, import_clients, run, run_action

BLOB_BYTES = 6 << 20
CHUNK_BYTES, PART_BYTES = 1 << 20, 5 << 20
NAME = "model"
TAG = "shared"
CORRUPT = 3
NUM_PUSHERS = 8
MAX_TRIES = 5  # for each injection: a fault that comes too late is none


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

    def note(self, code: int | None, when: str) -> None:
        """Take an exit code that should have been 0."""
        if code != 0:
            self.corrupt.append(f"{when}: exit code {code}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=16, help="of pushes, and as many of pulls, a registry")
    parser.add_argument("--drops", type=int, default=8, help="in pushes, and as many in pulls, a registry")
    parser.add_argument("--rounds", type=int, default=20, help="of 8 pushers to one tag, a registry")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--backend", action="append", help="only this kind, which may be repeated; others keep their rows"
    )
    parser.add_argument("--moto", help="the program moto_server")
    parser.add_argument("--mlflow", help="the program mlflow, with its server")
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    import_clients()
    upload.CHUNK_BYTES, s3.PART_BYTES = CHUNK_BYTES, PART_BYTES
    rng = random.Random(args.seed)
    tallies: list[Tally] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        root = Path(name)
        for backend in backends(root, servers, moto=args.moto, mlflow=args.mlflow):
            if args.backend and backend.name not in args.backend:
                continue
            place = root / f"work-{backend.name}"
            tallies += disturb(backend, place, args.kills, args.drops, rng)
            rounds.append(compete(backend, place, args.rounds, rng))
            print(rounds[-1], *tallies[-4:], sep="\n", file=sys.stderr, flush=True)
            if args.out is not None:  # what is done stays where a later kind takes too long
                write(args, tallies, rounds)
    print_tables(tallies, rounds)
    return 1 if any(each.corrupt for each in tallies) or any(each["wrong"] for each in rounds) else 0


def write(args: argparse.Namespace, tallies: Sequence[Tally], rounds: Sequence[dict[str, Any]]) -> None:
    """Write the result file of the kinds that are done; with --backend, rows of other kinds that are in the
    file stay.
    """
    done = [*({"kind": "injection", **vars(each)} for each in tallies), *rounds]
    rows = [{**each, "commit": args.commit, "seed": args.seed} for each in done]
    if args.backend and args.out.is_file():
        old = json.loads(args.out.read_text())["rows"]
        rows = [*(each for each in old if each["backend"] not in args.backend), *rows]
    facts = {
        "injections": sum(each.get("injected", 0) for each in rows),
        "corrupt": sum(len(each.get("corrupt", ())) + each.get("wrong", 0) for each in rows),
        "blob_bytes": BLOB_BYTES,
        "chunk_bytes": CHUNK_BYTES,
    }
    write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts=facts)


def make_artifact(place: Path, seed: int, num_bytes: int = BLOB_BYTES) -> Path:
    """Return an artifact of random bytes, in the workspace of a place."""

    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(random.Random(seed).randbytes(num_bytes))
        (writer.path / "more.bin").write_bytes(hashlib.sha256(str(seed).encode()).digest() * 5000)
        (writer.path / "config.json").write_text(f'{{"seed": {seed}}}')
        writer.describe(role="checkpoint")

    key = Workspace.key("fault", 1, {}, {}, seed)
    return Workspace(place / "workspace").commit(key, "fault", {}, build).path


@dataclass(frozen=True)
class Usual:
    """An undisturbed command: its seconds, and the bytes that passed each relay."""

    seconds: float
    num_bytes: dict[Proxy, int]


def measure(backend: Backend, action: Callable[[], None]) -> Usual:
    """Run a command undisturbed."""
    before = {proxy: proxy.num_bytes for proxy in backend.proxies}
    began = time.monotonic()
    code = run(action)
    assert code == 0, f"an undisturbed command at {backend.name} ended with exit code {code}"
    seconds = time.monotonic() - began
    return Usual(seconds, {proxy: proxy.num_bytes - before[proxy] for proxy in backend.proxies})


def disturb(backend: Backend, place: Path, num_kills: int, num_drops: int, rng: random.Random) -> list[Tally]:
    """Inject faults into pushes and pulls of one registry."""
    run(partial(push_to, backend, make_artifact(place, rng.getrandbits(40))))  # makes repository or model
    current = make_artifact(place, rng.getrandbits(40))
    usual_push = measure(backend, partial(push_to, backend, current))
    usual_pull = measure(backend, partial(pull_from, backend, place / "undisturbed"))
    tallies = []
    for fault, count in (("kill", num_kills), ("drop", num_drops if backend.proxies else 0)):
        pushes, pulls = (Tally(backend.name, backend.server, each, fault) for each in ("push", "pull"))
        for _ in range(MAX_TRIES * count):
            if pushes.injected < count:
                new = make_artifact(place, rng.getrandbits(40))
                disturb_push(backend, current, new, pushes, inject(backend, pushes, new, usual_push, rng))
                shutil.rmtree(current)
                current = new
        for _ in range(MAX_TRIES * count):
            if pulls.injected < count:
                target = place / "pulled"
                disturb_pull(backend, current, target, pulls, inject(backend, pulls, target, usual_pull, rng))
        tallies += [pushes, pulls] if count else []
    return tallies


def disturb_push(backend: Backend, old: Path, new: Path, tally: Tally, code: int | None) -> None:
    """Look at the tag after an injection, and push again."""
    digests = {open_artifact(each).digest for each in (old, new)}
    tally.note(run(partial(look, backend, digests)), "after a fault")
    if code == 0:
        tally.note(run(partial(look, backend, {open_artifact(new).digest})), "a push that went on")
    tally.note(run(partial(push_to, backend, new)), "the next push")
    tally.note(run(partial(look, backend, {open_artifact(new).digest})), "after it")


def disturb_pull(backend: Backend, current: Path, target: Path, tally: Tally, code: int | None) -> None:
    """Look at the destination after an injection, and pull again where there is none."""
    digest = open_artifact(current).digest
    if code == 0 and not target.exists():
        tally.corrupt.append("a pull that went on left nothing")
    if not target.exists():
        tally.note(run(partial(pull_from, backend, target)), "the next pull")
    tally.note(run(partial(compare, target, digest)), "after it")
    left = [each.name for each in target.parent.iterdir() if f".{target.name}." in each.name]
    if left:
        tally.corrupt.append(f"left beside the destination: {left}")
    shutil.rmtree(target, ignore_errors=True)


def inject(backend: Backend, tally: Tally, path: Path, usual: Usual, rng: random.Random) -> int | None:
    """Run a command with one fault, and count it unless it came too late to be one; return the exit code,
    None where it was killed.
    """
    action = partial(push_to if tally.command == "push" else pull_from, backend, path)
    if tally.fault == "kill":
        code = run(action, rng.uniform(0, usual.seconds))
        tally.injected += code is None
        return code
    proxy = rng.choice(backend.proxies)
    proxy.arm(rng.randrange(max(1, usual.num_bytes[proxy])))
    code = run(action)
    if proxy.disarm():
        tally.injected += 1
        tally.survived += code == 0
    return code


def push_to(backend: Backend, path: Path) -> None:
    backend.begin()
    push(open_registry(backend.url), open_artifact(path), name=NAME, aliases=(TAG,))


def pull_from(backend: Backend, target: Path) -> None:
    backend.begin()
    pull(f"{backend.url}/{NAME}:{TAG}", target)


def look(backend: Backend, digests: set[str]) -> None:
    """Exit with CORRUPT where the tag names anything but one of these artifacts, whole."""
    backend.begin()
    if verify(f"{backend.url}/{NAME}:{TAG}").artifact_digest not in digests:
        os._exit(CORRUPT)


def compare(target: Path, digest: str) -> None:
    verify_artifact(open_artifact(target))
    if open_artifact(target).digest != digest:
        os._exit(CORRUPT)


def compete(backend: Backend, place: Path, num_rounds: int, rng: random.Random) -> dict[str, Any]:
    """Let 8 processes push to one tag at once, and one look at it all the time; return what was wrong."""
    began = time.monotonic()
    wrong: list[str] = []
    num_looks = 0
    known = {verified(backend)}
    for number in range(num_rounds):
        paths = [make_artifact(place, rng.getrandbits(40), 100_000) for _ in range(NUM_PUSHERS)]
        known |= {open_artifact(path).digest for path in paths}
        processes = [
            FORK.Process(target=run_action, args=(partial(patiently, backend, path),)) for path in paths
        ]
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
        backend.begin()
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
