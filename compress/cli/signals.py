"""SIGTERM as an orderly end: it raises `Terminated` in the main thread, so that temporary files are removed
on the way out and the command ends with exit code 143, its sentence and its JSON document.

Imports nothing heavy: `start` uses it before everything else.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from compress.errors import Terminated

_SAME_REQUEST_S = 1.0
_early = list[int]()
_ends_the_process = False


def remember() -> None:
    """Keep a SIGTERM or SIGINT that comes while the command line is still being imported, for
    `Termination.check`. Only a process that ends with the command calls this.
    """
    global _ends_the_process
    if _may_handle():
        _ends_the_process = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: _early.append(number))


class Termination:
    """While the block runs, SIGTERM raises Terminated. A second one within a second is the same request, sent
    to the process and to its group: it does not disturb the cleaning up.

    Elsewhere than in the main thread, and where the caller has SIGTERM ignored, nothing is changed.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._raised_s = float("-inf")

    def __enter__(self) -> "Termination":
        if _may_handle():
            self._set(signal.SIGTERM, self._end)
            if _ends_the_process:
                self._set(signal.SIGINT, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _ends_the_process:  # a signal while the interpreter ends must not change the exit code
            self.ignore()
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Terminated or KeyboardInterrupt if a signal came before the block."""
        if _early:
            number = _early[0]
            _early.clear()
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore SIGTERM and SIGINT for the rest of the block, in which the outcome is printed."""
        if self._before:
            self._set(signal.SIGTERM, signal.SIG_IGN)
            self._set(signal.SIGINT, signal.SIG_IGN)

    def _set(self, number: signal.Signals, handler: Any) -> None:
        before = signal.signal(number, handler)
        self._before.setdefault(number, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._raised_s > _SAME_REQUEST_S:
            self._raised_s = now_s
            raise Terminated


def _may_handle() -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None)
