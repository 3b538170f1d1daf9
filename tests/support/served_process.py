"""`compress serve` in a process of its own: what it writes, how it ends, and how much memory it takes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 90.0


class ServedProcess:
    """A server that was started by the command, and the file of its stderr."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            if found := re.search(r"serving \S+ at (http://\S+)", self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def records(self) -> list[dict[str, Any]]:
        """The lines of the log that are records of requests."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def served(
    model: object, log: Path, *arguments: object, environ: dict[str, str] | None = None
) -> Iterator[ServedProcess]:
    """Start `compress serve MODEL` on a free port; the process is killed at the end of the block."""
    words = ["serve", model, "--device", "cpu", "--port", "0", *arguments]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "compress", *map(str, words)],
            stderr=stream,
            env={**os.environ, **(environ or {})},
        )
        try:
            yield ServedProcess(process, log)
        finally:
            process.kill()
            process.wait()
