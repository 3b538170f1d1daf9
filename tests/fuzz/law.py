"""The law of untrusted input: a reader returns, or raises a `CompressError` with exit code 2, 4 or 5, and for
an input below 1 MiB it takes at most 2 s and less than 1 GiB of further memory.
"""

import contextlib
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from compress.errors import CompressError
from compress.untrusted.text import one_line

MAX_SECONDS = 2.0
MAX_MORE_BYTES = 1 << 30
EXIT_CODES = frozenset({2, 4, 5})
_PACKAGE = "/compress/"
_ROOT = str(Path(__file__).parents[2]) + "/"
_TRIES = 3
"""A slow input is tried that often: on a busy machine a single try may be slow for reasons of its own."""


class TooSlow(BaseException):
    """Raised in a reader when its time is over; no `except Exception` catches it."""


@dataclass(frozen=True)
class Outcome:
    """What one input led to. `kind` is `returned` or the class of the error, `place` the line of the package
    that raised it; `failure` is a sentence where the law is broken."""

    kind: str
    place: str
    seconds: float
    more_bytes: int
    failure: str | None = None
    trace: str = ""

    @property
    def key(self) -> str:
        """The same for inputs that end in the same way."""
        return f"{self.kind} {self.place}".strip()


def judge(run: Callable[[bytes, Path], None], data: bytes, directory: Path) -> Outcome:
    """Run a target on one input and return its outcome; slow inputs are tried again before they count."""
    outcome = _once(run, data, directory)
    for _ in range(_TRIES - 1):
        if outcome.seconds <= MAX_SECONDS:
            break
        again = _once(run, data, directory)
        outcome = again if again.seconds < outcome.seconds else outcome
    return outcome


def warm_up(run: Callable[[bytes, Path], None], data: bytes, directory: Path) -> None:
    """Run a target without limits, so that what a library imports and reserves once counts for no input."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(data, directory)


def _once(run: Callable[[bytes, Path], None], data: bytes, directory: Path) -> Outcome:
    peak = _peak_bytes()
    began = time.perf_counter()
    kind = "returned"
    place = ""
    failure = None
    trace = ""
    try:
        with _limits(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(data, directory)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  panics of Rust are no Exception
        kind = type(error).__name__
        place = _place(error)
        failure = _broken(error)
        if failure is not None:
            trace = "".join(traceback.format_exception(error)).replace(_ROOT, "")
    seconds = time.perf_counter() - began
    more_bytes = max(0, _peak_bytes() - peak)
    if failure is None and seconds > MAX_SECONDS:
        failure = f"took {seconds:.1f} s"
        kind = "TooSlow"
    if failure is None and more_bytes >= MAX_MORE_BYTES:
        failure = f"took {more_bytes / 2**30:.1f} GiB"
        kind = "TooLarge"
    return Outcome(kind, place, seconds, more_bytes, failure, trace)


def _broken(error: BaseException) -> str | None:
    """Return why an error breaks the law, None where it does not."""
    if isinstance(error, TooSlow):
        return f"took more than {MAX_SECONDS:.0f} s"
    if not isinstance(error, CompressError):
        return f"{type(error).__name__}: {one_line(str(error))[:300]}"
    if error.exit_code not in EXIT_CODES:
        return f"{type(error).__name__} with exit code {error.exit_code}"
    if not str(error).strip():
        return f"{type(error).__name__} without a message"
    return None


def _place(error: BaseException) -> str:
    """Return the innermost line of the package in a traceback, as `file.py:function`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in frame.filename]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename.rpartition(_PACKAGE)[2]}:{frame.name}:{frame.lineno}"


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Bound the time and the address space of a block."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + MAX_MORE_BYTES
    before = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
