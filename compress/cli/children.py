"""Child processes, so many at a time as there are places; their messages pass through, and signals reach all.

The first SIGINT or SIGTERM is passed on, and nothing further is started: a run stops at its next boundary. At
a second signal they stop at once, and what still lives after `GRACE_S` is killed, which leaves a workspace
whole. When this process ends before them, the kernel sends them SIGTERM.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

GRACE_S = 10.0
_SAME_REQUEST_S = 1.0
"""A second SIGTERM so soon is the same request, sent to the process and to its group."""
_LOOK_S = 0.1
_SET_DEATH_SIGNAL = 1
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Order:
    """A command to be run in a process of its own, and the name that its messages get."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (128 and the number of the signal that killed it), or None where it
    was not started.
    """

    exit_code: int | None
    stdout: str = ""
    seconds: float = 0.0


@dataclass
class Stop:
    """The signals that came so far, and when the children are to be killed."""

    received: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_passed_on: int = 0
    kill_at_s: float = float("inf")

    @property
    def requested(self) -> bool:
        return bool(self.received)

    def remember(self, number: int, frame: object) -> None:
        """Keep a signal for the loop; it is the handler."""
        now_s = time.monotonic()
        is_same = number == signal.SIGTERM and number in self.received[-1:]
        if is_same and now_s - self.times_s[-1] < _SAME_REQUEST_S:
            return
        self.received.append(number)
        self.times_s.append(now_s)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yield the signals that come while the block runs, instead of ending the process."""
    stop = Stop()
    before = {number: signal.signal(number, stop.remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_children(
    orders: Sequence[Order],
    *,
    places: Sequence[Mapping[str, str]],
    show: Callable[[str], None],
    stop: Stop,
    goes_on: Callable[[int], bool] = lambda code: True,
) -> list[Ended]:
    """Run the commands, each in a place of its own, and return how each ended, in the order given.

    A place is what is added to the environment, such as the one GPU of the child; no two children are in one
    place at a time. Messages are shown with the name of the child. Where `goes_on` returns False of an exit
    code, the others are stopped as by a signal, and no more are started.
    """
    pool = _Pool(orders, list(places), show, stop)
    try:
        while pool.waiting or pool.running:
            pool.start()
            pool.read()
            for code in pool.collect():
                if not goes_on(code):
                    pool.cancel()
            pool.pass_signals_on()
    finally:
        pool.kill()
    return [pool.ended.get(idx, Ended(None)) for idx in range(len(orders))]


@dataclass
class _Child:
    idx: int
    name: str
    place: Mapping[str, str]
    process: "subprocess.Popen[bytes]"
    stdout: IO[bytes]
    started_s: float
    line: bytes = b""


class _Pool:
    """The children that wait, run and have ended."""

    def __init__(
        self,
        orders: Sequence[Order],
        free: list[Mapping[str, str]],
        show: Callable[[str], None],
        stop: Stop,
    ) -> None:
        self.waiting = list(enumerate(orders))
        self.running: list[_Child] = []
        self.ended: dict[int, Ended] = {}
        self._free = free
        self._show = show
        self._stop = stop
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start children while there are places, and no signal asked to stop."""
        if self._stop.requested:
            self.waiting.clear()
        while self.waiting and self._free:
            idx, order = self.waiting.pop(0)
            place = self._free.pop(0)
            stdout = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child has ended
            process = subprocess.Popen(
                order.command,
                env={**os.environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C of a terminal reaches this process alone, which passes it on once
                preexec_fn=_end_with_parent(os.getpid()),
            )
            child = _Child(idx, order.name, place, process, stdout, time.perf_counter())
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            self._selector.register(process.stderr, selectors.EVENT_READ, child)
            self.running.append(child)

    def read(self) -> None:
        """Show the messages that came, or wait a moment for some."""
        for key, _ in self._selector.select(_LOOK_S):
            if not self._show_messages(key.data):
                self._selector.unregister(key.fileobj)

    def collect(self) -> list[int]:
        """Take the children that have ended out of their places, and return their exit codes."""
        codes = []
        for child in [each for each in self.running if each.process.poll() is not None]:
            self._show_messages(child)
            if child.line:
                self._show(_named(child.name, child.line))
            assert child.process.stderr is not None
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.process.stderr)
            child.process.stderr.close()
            code = child.process.returncode
            with child.stdout as stdout:
                stdout.seek(0)
                text = stdout.read().decode("utf-8", "replace")
            code = code if code >= 0 else 128 - code
            self.ended[child.idx] = Ended(code, text, time.perf_counter() - child.started_s)
            self.running.remove(child)
            self._free.append(child.place)
            codes.append(code)
        return codes

    def cancel(self) -> None:
        """Ask the children that run to stop, and start no more."""
        self.waiting.clear()
        self._send(signal.SIGTERM)

    def pass_signals_on(self) -> None:
        """Send the children the first signal as it is, a second one as SIGINT, at which a run that was asked
        already ends at once, and SIGKILL to those that still live a while later.
        """
        while self._stop.num_passed_on < len(self._stop.received):
            self._stop.num_passed_on += 1
            is_first = self._stop.num_passed_on == 1
            self._send(self._stop.received[0] if is_first else signal.SIGINT)
            if is_first:
                name = signal.Signals(self._stop.received[0]).name
                self._show(f"{name}: all runs stop at their next safe points (again to stop at once)")
            else:
                self._stop.kill_at_s = min(self._stop.kill_at_s, time.monotonic() + GRACE_S)
        if time.monotonic() > self._stop.kill_at_s:
            self._send(signal.SIGKILL)

    def kill(self) -> None:
        """Kill what still runs, after an error of this process."""
        self._send(signal.SIGKILL)
        for child in self.running:
            child.process.wait()
            child.stdout.close()
        self._selector.close()

    def _send(self, number: int) -> None:
        for child in self.running:
            child.process.send_signal(number)

    def _show_messages(self, child: _Child) -> bool:
        """Show what a child wrote so far, by lines; return False where it has closed its stderr."""
        assert child.process.stderr is not None
        while True:
            try:
                data = os.read(child.process.stderr.fileno(), _MAX_LINE_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, child.line = (child.line + data).split(b"\n")
            if len(child.line) > _MAX_LINE_BYTES:
                lines.append(child.line)
                child.line = b""
            for line in lines:
                self._show(_named(child.name, line))


def _named(name: str, line: bytes) -> str:
    return f"[{name}] {line.decode('utf-8', 'replace')}"


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Return what a child does before its program starts: have the kernel send it SIGTERM when its parent
    ends (`prctl(2)`, Linux).
    """
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:  # it ended between
            os._exit(128 + signal.SIGTERM)

    return prepare
