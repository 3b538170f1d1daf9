"""Runs a small recipe by Debian's cron, with the line that `compress schedule render cron` prints.

    python -m scripts.check_schedule --out benchmarks/schedule.json

Four times, each at the next full minute: the recipe is new; nothing changed; a gate was tightened until it
fails; and the recipe changed again and two lines start in the same minute. After each, exit code, JSON
document, metrics file and what cron logged are compared with what is documented. Takes about eight minutes,
root, and the Debian package `cron`; the crontab of the user must be empty, and is empty afterwards. Cron's
log goes to a socket of this script where nothing listens on /dev/log.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench_setup import markdown, write_results

LOG = Path("/dev/log")
AHEAD_S = 15
"""Seconds that cron has to read a crontab before its minute begins."""
WAIT_S = 300.0
RECIPE = """\
version: 1
model: builtin://reference
stages:
  - {{kind: calibrate, num_samples: {num_samples}, seq_len: 64}}
  - {{kind: quantize, scheme: W4A16_G128, preset: fast}}
  - {{kind: export}}
  - kind: validate
    num_samples: 2
    seq_len: 32
    latency: null
    speculative: null
    gates: {{ppl_ratio: {gate}}}
push: {{to: "layout://registry", name: small}}
"""


@dataclass(frozen=True)
class Case:
    """A change of the recipe, the schedules that start in one minute, and how they end."""

    name: str
    num_samples: int
    gate: float
    schedules: tuple[str, ...]
    exit_codes: tuple[int, ...]
    statuses: tuple[str, ...]


CASES = (
    Case("changed", 4, 3.0, ("nightly",), (0,), ("done",)),
    Case("unchanged", 4, 3.0, ("nightly",), (0,), ("unchanged",)),
    Case("failed gate", 4, 1.0, ("nightly",), (3,), ("gate_failed",)),
    Case("two at once", 6, 3.0, ("nightly", "second"), (0, 75), ("done", "error")),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default=None, help="of the code that is tried")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args(argv)

    rows = []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = root / "50% of it's models"  # what a crontab must quote
        directory.mkdir()
        messages = stack.enter_context(cron_log())
        stack.enter_context(own_crontab())
        stack.enter_context(cron())
        for case in CASES:
            rows.append(tried(case, directory, messages))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(
        markdown(
            ["case", "exit codes", "status", "cron's log", "wrong"],
            [[row["case"], str(row["exit_codes"]), ", ".join(row["statuses"]), "; ".join(row["cron_log"]),
              "; ".join(row["wrong"])] for row in rows],
        )
    )  # fmt: skip
    if args.out is not None:
        write_results(args.out, rows, device=torch.device("cpu"), commit=args.commit, facts={})
    return 1 if any(row["wrong"] for row in rows) else 0


def tried(case: Case, directory: Path, messages: "Messages") -> dict[str, Any]:
    """Have cron run the case and return what it left, with the sentences on what is wrong."""
    recipe = directory / "small recipe.yaml"
    recipe.write_text(RECIPE.format(num_samples=case.num_samples, gate=case.gate))
    before = {name: metrics(directory / f"{name}.prom") for name in case.schedules}
    for name in case.schedules:
        (directory / f"{name}.json").unlink(missing_ok=True)
    messages.take()
    start_s = time.time() + AHEAD_S
    start_s += -start_s % 60
    at = time.localtime(start_s)
    lines = [line_of(name, f"{at.tm_min} {at.tm_hour} * * *", directory) for name in case.schedules]
    subprocess.run(["crontab", "-"], input="".join(lines), text=True, check=True)
    documents = [wait_for(directory / f"{name}.json") for name in case.schedules]
    time.sleep(2)  # cron logs the end of a job when it has read all of its output
    logged = messages.take()
    found = sorted(documents, key=lambda each: each["exit_code"])
    failures = [re.findall(r"failed with exit status (\d+)", each) for each in logged]
    row = {
        "case": case.name,
        "lines": [_without_places(line.splitlines()[-1], directory) for line in lines],
        "exit_codes": [each["exit_code"] for each in found],
        "statuses": [each["status"] for each in found],
        "seconds": [each.get("seconds") for each in found],
        "cron_log": [each for each in logged if "failed with" in each or "info" in each],
        "log": [(directory / f"{name}.log").read_text().splitlines()[-1] for name in case.schedules],
    }
    wrong = []
    if tuple(row["exit_codes"]) != case.exit_codes or tuple(row["statuses"]) != case.statuses:
        wrong.append(f"not {case.exit_codes} and {case.statuses}")
    if sorted(int(code) for codes in failures for code in codes) != [c for c in case.exit_codes if c]:
        wrong.append("cron logged other exit codes")
    if list(directory.glob(".*.json")):
        wrong.append("a document without its name is left")
    after = {name: metrics(directory / f"{name}.prom") for name in case.schedules}
    wrong += [
        f"metrics: {sentence}"
        for name, document in zip(case.schedules, documents, strict=True)
        for sentence in untrue(before[name], after[name], document, start_s)
    ]
    return {**row, "metrics": list(after.values()), "wrong": wrong}


def _without_places(line: str, directory: Path) -> str:
    """Return a line without the paths of this machine."""
    return line.replace(f"{Path(sys.executable).parent}/", "").replace(str(directory.parent), "")


def line_of(name: str, schedule: str, directory: Path) -> str:
    """Return the text that `compress schedule render cron` prints."""
    compress = str(Path(sys.executable).with_name("compress"))
    options = ["--name", name, "--workdir", str(directory), "--executable", compress]
    options += ["--schedule", schedule, "--metrics-file", str(directory / f"{name}.prom"), "--device", "cpu"]
    command = [compress, "schedule", "render", "cron", "small recipe.yaml", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_for(path: Path) -> dict[str, Any]:
    """Return the document when the run has ended.

    Raises:
        TimeoutError: it does not end in time.
    """
    end_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"no {path.name} after {WAIT_S:.0f} s")
        time.sleep(0.2)
    return dict(json.loads(path.read_text()))


def metrics(path: Path) -> dict[str, float]:
    """Return the samples of a metrics file by name and labels, read by Prometheus' own parser."""
    if not path.exists():
        return {}
    return {
        " ".join(
            [sample.name, *(f"{key}={value}" for key, value in sample.labels.items() if key != "recipe")]
        ): (sample.value)
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def untrue(
    before: dict[str, float], after: dict[str, float], document: dict[str, Any], start_s: float
) -> Iterator[str]:
    """Yield what the metrics do not state as the document and the metrics before have it."""
    success = "compress_run_last_success_timestamp_seconds"
    good = document["status"] in ("done", "unchanged")
    if after["compress_run_exit_code"] != document["exit_code"]:
        yield "another exit code"
    if after[f"compress_run_status status={document['status']}"] != 1.0:
        yield "another status"
    if after["compress_run_last_timestamp_seconds"] < start_s:
        yield "the last run is an older one"
    if (after[success] < start_s) if good else (after[success] != before.get(success, 0.0)):
        yield "another time of the last success"
    for gate in document.get("gates", ()):
        if after[f"compress_gate_limit gate={gate['name']} relation={gate['relation']}"] != gate["limit"]:
            yield "another limit"
        if after[f"compress_gate_value gate={gate['name']}"] != gate["value"]:
            yield "another value"


@contextmanager
def cron() -> Iterator[None]:
    """Run the daemon while the block runs, logging start, end and failure of jobs."""
    process = subprocess.Popen(["cron", "-f", "-L", "7"])
    time.sleep(1)
    if process.poll() is not None:
        raise RuntimeError("cron does not start here; it needs root, and no other cron.")
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def own_crontab() -> Iterator[None]:
    """Take the crontab of this user while the block runs.

    Raises:
        RuntimeError: there is one already.
    """
    if subprocess.run(["crontab", "-l"], capture_output=True, check=False).stdout.strip():
        raise RuntimeError("this user has a crontab; nothing is tried over it.")
    try:
        yield
    finally:
        subprocess.run(["crontab", "-r"], check=False)


class Messages:
    """What cron sends to the system's log."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)

    def take(self) -> list[str]:
        """Return the messages since the last call, without date and name of the program."""
        found = []
        while True:
            try:
                text = self._listener.recv(65536).decode("utf-8", "replace").rstrip("\0\n")
            except BlockingIOError:
                return found
            found.append(text.partition("]: ")[2])


@contextmanager
def cron_log() -> Iterator[Messages]:
    """Listen on /dev/log while the block runs.

    Raises:
        RuntimeError: the system's own log daemon does.
    """
    if LOG.exists():
        raise RuntimeError(f"{LOG} belongs to the system's log here; try where there is none.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(LOG))
        try:
            yield Messages(listener)
        finally:
            LOG.unlink()


if __name__ == "__main__":
    sys.exit(main())
