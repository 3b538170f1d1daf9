"""A fuzz campaign: inputs of one target after the other, in one process or in several that are watched.

The inputs of a target depend on the seed, the worker and what earlier inputs led to, and on nothing else: an
input that ends in a way that was not seen before joins the pool that the next ones are made from.
"""

import contextlib
import multiprocessing
import os
import queue
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.fuzz.law import Outcome, judge, warm_up
from tests.fuzz.minimise import minimise
from tests.fuzz.targets import TARGETS, Target

HOME = Path(__file__).parent
CORPUS = HOME / "corpus"
CRASHES = HOME / "crashes"
SLICE_SECONDS = 0.5
"""How long a worker stays with a target before it takes the next one."""
SILENT_SECONDS = 60.0
"""A worker that reports nothing for so long hangs where no signal reaches it: it is ended and fails."""
MINIMISE_SECONDS = 5.0
MAX_POOL = 200


@dataclass(frozen=True)
class Failure:
    """An input that broke the law, made small, and how."""

    target: str
    key: str
    reason: str
    trace: str
    data: bytes

    @property
    def file_name(self) -> str:
        """A readable name: the error, the function that raised it, and a digest of the input."""
        kind, _, place = self.key.partition(" ")
        words = re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"\.py|:\d+$", "", place)).strip("-")
        digest = sha256(self.data).hexdigest()[:8]
        return "-".join(part for part in (kind, words, digest) if part) + TARGETS[self.target].suffix


@dataclass
class Tally:
    """What the inputs of one target led to."""

    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest_bytes: int = 0
    most_more_bytes: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)

    def add(self, outcome: Outcome, data: bytes) -> None:
        self.inputs += 1
        self.outcomes[outcome.key] += 1
        self.most_more_bytes = max(self.most_more_bytes, outcome.more_bytes)
        if outcome.seconds > self.slowest_s:
            self.slowest_s = outcome.seconds
            self.slowest_bytes = len(data)

    def merge(self, other: "Tally") -> None:
        """Add another worker's tally."""
        self.inputs += other.inputs
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        self.most_more_bytes = max(self.most_more_bytes, other.most_more_bytes)
        if other.slowest_s > self.slowest_s:
            self.slowest_s = other.slowest_s
            self.slowest_bytes = other.slowest_bytes
        self.failures = {**other.failures, **self.failures}

    def facts(self) -> dict[str, Any]:
        """Return the tally as JSON."""
        return {
            "inputs": self.inputs,
            "inputs_per_s": round(self.inputs / self.seconds, 1) if self.seconds else None,
            "distinct_outcomes": len(self.outcomes),
            "outcomes": dict(self.outcomes.most_common()),
            "slowest_s": round(self.slowest_s, 3),
            "slowest_bytes": self.slowest_bytes,
            "most_more_bytes": self.most_more_bytes,
            "failures": [
                {
                    "file": each.file_name,
                    "outcome": each.key,
                    "count": self.outcomes[each.key],
                    "reason": each.reason,
                    "trace": each.trace,
                }
                for each in self.failures.values()
            ],
        }


class TargetRun:
    """The inputs of one target in one process; `directory` is its own."""

    def __init__(self, target: Target, directory: Path, *, seed: str, corpus: Path = CORPUS) -> None:
        self.target = target
        self.tally = Tally()
        self._directory = directory
        self._random = random.Random(f"{seed}/{target.name}")
        self._seeds = [path.read_bytes() for path in inputs_of(corpus, target)]
        self._pool = list(self._seeds)
        for data in self._seeds:
            warm_up(target.run, data, directory)

    def next_input(self) -> bytes:
        """Return another input: half of them are made from a seed, half from what was of interest."""
        base = self._random.choice(self._seeds if self._random.random() < 0.5 else self._pool)
        return self.target.form.mutate(base, self._pool, self._random)

    def step(self, data: bytes) -> Outcome:
        """Run one input, and keep it if it ends in a new way; a new failure is made small."""
        new = self.tally.outcomes.keys()
        outcome = judge(self.target.run, data, self._directory)
        if outcome.key not in new and outcome.failure is None and len(self._pool) < MAX_POOL:
            self._pool.append(data)
        self.tally.add(outcome, data)
        if outcome.failure is not None and outcome.key not in self.tally.failures:
            small = minimise(
                data,
                self.target.form,
                lambda each: self._ends_as(each, outcome.key),
                seconds=MINIMISE_SECONDS,
            )
            self.tally.failures[outcome.key] = Failure(
                self.target.name, outcome.key, outcome.failure, outcome.trace, small
            )
        return outcome

    def _ends_as(self, data: bytes, key: str) -> bool:
        outcome = judge(self.target.run, data, self._directory)
        return outcome.failure is not None and outcome.key == key


def inputs_of(folder: Path, target: Target) -> list[Path]:
    """Return the inputs of a target in a folder, such as the corpus, sorted by name."""
    return sorted((folder / target.name).glob("*" + target.suffix))


def store(failure: Failure, folder: Path) -> Path:
    """Write a failing input and, beside it, its traceback, which git ignores."""
    path = folder / failure.target / failure.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(failure.data)
    path.with_name(path.name + ".trace").write_text(f"{failure.reason}\n{failure.trace}", encoding="utf-8")
    return path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new directory, in memory where the system has a place for that, and remove it."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_targets(
    targets: Sequence[Target], directory: Path, *, seed: str, seconds: float
) -> Iterator[dict[str, Tally]]:
    """Run the targets in turn until the time is over; yields the tally of a target after its turn and
    after a failure, which takes time to make small."""
    runs = []
    for target in targets:
        place = directory / target.name
        place.mkdir(parents=True, exist_ok=True)
        runs.append(TargetRun(target, place, seed=seed))
        yield {target.name: runs[-1].tally}
    current = directory / "current"
    ends = time.monotonic() + seconds
    while True:
        for run in runs:
            if time.monotonic() >= ends:
                return
            began = time.monotonic()
            turn_ends = min(ends, began + SLICE_SECONDS)
            while time.monotonic() < turn_ends:
                data = run.next_input()
                current.write_bytes(run.target.name.encode() + b"\n" + data)
                if run.step(data).failure is not None:
                    yield {run.target.name: run.tally}
            run.tally.seconds += time.monotonic() - began
            yield {run.target.name: run.tally}


def run_jobs(targets: Sequence[Target], *, seconds: float, jobs: int, seed: int) -> dict[str, Tally]:
    """Run the targets in several processes and return the tallies by target.

    A worker that dies or hangs fails with the input it had; another one takes its place.
    """
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    ends = time.monotonic() + seconds
    names = [target.name for target in targets]
    tallies: dict[tuple[str, str], Tally] = {}
    lost: list[Failure] = []
    with scratch() as root:
        workers: dict[str, Any] = {}
        heard: dict[str, float] = {}

        def start(worker: str, its_seconds: float) -> None:
            (root / worker).mkdir()
            process = context.Process(
                target=_work,
                args=(names, str(root / worker), f"{seed}/{worker}", its_seconds, worker, reports),
                daemon=True,
            )
            process.start()
            workers[worker] = process
            heard[worker] = time.monotonic()

        for job in range(jobs):
            start(f"{job}", seconds)
        while workers:
            with contextlib.suppress(queue.Empty):
                worker, found = reports.get(timeout=1.0)
                heard[worker] = time.monotonic()
                for name, tally in found.items():
                    tallies[worker, name] = tally
                continue  # every report that is there comes before the dead are counted
            for worker, process in list(workers.items()):
                silent = time.monotonic() - heard[worker] > SILENT_SECONDS
                if process.is_alive() and not silent:
                    continue
                process.kill()
                process.join()
                del workers[worker]
                if process.exitcode != 0:
                    lost.append(_lost(root / worker, silent, process.exitcode))
                    if time.monotonic() < ends:
                        start(f"{worker}+", ends - time.monotonic())
    merged: dict[str, Tally] = {name: Tally() for name in names}
    for (_, name), tally in tallies.items():
        merged[name].merge(tally)
    for failure in lost:
        tally = merged.setdefault(failure.target, Tally())
        tally.inputs += 1
        tally.outcomes[failure.key] += 1
        tally.failures.setdefault(failure.key, failure)
    return merged


def _work(names: list[str], directory: str, seed: str, seconds: float, worker: str, reports: Any) -> None:
    os.environ["RUST_BACKTRACE"] = "0"
    targets = [TARGETS[name] for name in names]
    for tallies in run_targets(targets, Path(directory), seed=seed, seconds=seconds):
        reports.put((worker, tallies))


def _lost(directory: Path, silent: bool, exit_code: int) -> Failure:
    """Return the failure of a worker that died or hung, with the input it had."""
    current = directory / "current"
    name, _, data = (current.read_bytes() if current.exists() else b"").partition(b"\n")
    reason = (
        f"no answer for {SILENT_SECONDS:.0f} s" if silent else f"the process ended with exit code {exit_code}"
    )
    target = name.decode() if name.decode() in TARGETS else next(iter(TARGETS))
    return Failure(target, "Hung" if silent else "Died", reason, "", data)
