"""Output of commands: data goes to stdout, as text or as one JSON document `{"schema": 1, ...}`; notes and
progress go to stderr.

Nothing else in the package prints, and all that is printed goes through `untrusted.text`, because names,
facts and texts of models come from somebody else. Progress is a bar where there is a terminal, and otherwise
a log line now and then, so that a scheduled job's log stays readable.
"""

import contextlib
import io
import json
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from compress.cli.failure import Failure, failure_of
from compress.errors import CompressError, StorageError
from compress.untrusted.text import one_line, printable, printable_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from compress.context import Progress

SCHEMA = 1
LOG_INTERVAL_S = 5.0

JsonFlag = Annotated[
    bool, typer.Option("--json", help='Print one JSON document {"schema": 1, ...} to stdout.')
]


class _Result:
    """The document of the command that runs, held until its exit code is known: exactly one is printed.
    `observer` gets it too.
    """

    document: Mapping[str, Any] | None = None
    observer: Callable[[Mapping[str, Any]], None] | None = None


_RESULT = _Result()


def begin(*, debug: bool) -> None:
    """Forget the document of an earlier command, and send the logs of all libraries to stderr, printable.
    From then on, characters that the encoding of stdout lacks are printed as escapes, such as `\\xe9`.
    """
    _RESULT.document = None
    _RESULT.observer = None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; print would take the other one
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr does so from the start
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("compress").setLevel(
        logging.DEBUG if debug else logging.WARNING
    )  # other libraries' debug logs drown ours


class PrintableFormatter(logging.Formatter):
    """Formats log records for a terminal: control characters in messages and tracebacks are shown as
    escapes.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def emit(
    document: Mapping[str, Any], text: str, *, as_json: bool, failure: CompressError | None = None
) -> None:
    """Give a command's result: its form for people is printed at once, the document when the command ends.
    A result with a `failure`, such as a gate that failed, has the failure under `error`.
    """
    if as_json or _RESULT.observer is not None:
        error = {} if failure is None else {"error": failure_of(failure).as_json()}
        held = {**document, **error}
        _as_text(held)  # what is not JSON is a defect here and not at the end
        _RESULT.document = held
    if not as_json:
        write_data(text)
    if failure is not None:
        note(f"compress: {failure}")


def when_finished(observer: Callable[[Mapping[str, Any]], None]) -> None:
    """Have `observer` called with the document of the command that runs once the command has ended, with
    `--json` or without, whatever its outcome.
    """
    _RESULT.observer = observer


def leads() -> bool:
    """Return whether this process prints: of several ranks that torchrun started, rank 0 does."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def has_result() -> bool:
    """Return whether the command that runs has given a document."""
    return _RESULT.document is not None


def finish(exit_code: int, failure: Failure | None, *, as_json: bool) -> int:
    """Print the message of a failure to stderr and, with `--json`, the one document to stdout. Return the
    exit code: the given one, or 5 where stdout cannot be written.
    """
    held = _RESULT.document
    observer = _RESULT.observer
    _RESULT.document = None
    _RESULT.observer = None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; print would take the other one
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if failure is not None and failure.message:
        note(f"compress: {failure}")
    if failure is not None:
        held = {"status": "error", "error": failure.as_json()}
    if held is None:
        return exit_code
    document = _whole(held, exit_code)
    code = _printed(document, exit_code) if as_json else exit_code
    if observer is not None:
        observer({"schema": SCHEMA, **document})
    return code


def _whole(held: Mapping[str, Any], exit_code: int) -> dict[str, Any]:
    """Return the document with the status and the exit code that are known now."""
    status = held.get("status", "error" if exit_code else "done")
    error = {"error": held["error"]} if "error" in held else {}
    rest = {name: value for name, value in held.items() if name != "error"}
    return {"status": status, **rest, "exit_code": exit_code, **error}


def _printed(document: Mapping[str, Any], exit_code: int) -> int:
    """Print the one document and return the exit code, 5 where stdout cannot be written."""
    try:
        in_utf8 = (sys.stdout.encoding or "utf-8").replace("-", "").lower() == "utf8"
        _write(printable_json(_as_text(document, ensure_ascii=not in_utf8)) + "\n")
    except typer.Exit as stop:
        return stop.exit_code
    except StorageError as error:
        note(f"compress: {error}")
        return error.exit_code
    return exit_code


def show_traceback(error: BaseException) -> None:
    """Print where an error came from, for `--debug`."""
    note("".join(traceback.format_exception(error)).rstrip("\n"))


def _as_text(document: Mapping[str, Any], *, ensure_ascii: bool = False) -> str:
    return json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=ensure_ascii, allow_nan=False)


def write_data(text: str) -> None:
    """Print data to stdout. When its reader has gone, the command ends there, quietly, with exit code 5: not
    all data arrived.

    Raises:
        StorageError: stdout cannot be written.
    """
    write_piece(text + "\n")


def write_piece(text: str) -> None:
    """Print a part of the data to stdout at once, with nothing added; errors are those of `write_data`."""
    _write(printable(text))


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # the interpreter flushes again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(StorageError.exit_code) from None
        raise StorageError(f"stdout cannot be written: {error.strerror}.", where="stdout") from None


def note(message: str) -> None:
    """Print a line for the person who watches; never data. A stderr that is gone stops nothing."""
    with contextlib.suppress(OSError):
        print(printable(message), file=sys.stderr, flush=True)


def table(rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Return rows as columns padded to their widest cell; those in `right` are aligned to the right.
    A cell is one line of printable text, whatever it holds.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if not cells:
        return ""
    aligned_right = set(right)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    padded = (
        (
            cell.rjust(width) if column in aligned_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size_text(num_bytes: int) -> str:
    """Return a size such as `1.50 GiB`: binary units, three significant digits."""
    size = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.5 and len(units) > 1:
        size = size / 1024
        units = units[1:]
    digits = 0 if units[0] == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[0]}"


def duration_text(seconds: float) -> str:
    """Return a duration such as `1h02m`, `3m20s` or `7s`."""
    total = max(0, round(seconds))
    if total >= 3600:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 60}m{total % 60:02d}s" if total >= 60 else f"{total}s"


def peak_host_bytes() -> int:
    """Return the largest resident size this process had so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


@contextmanager
def progress(
    stage: str,
    *,
    stream: TextIO | None = None,
    peak_bytes: Callable[[], int] = peak_host_bytes,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator["Progress"]:
    """Show how far a stage is, with the time left and the peak memory, while the block runs."""
    out = sys.stderr if stream is None else stream
    if not is_terminal(out):
        yield _LogLines(stage, out, peak_bytes, clock)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<9}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("peak {task.fields[peak]}"),
    )
    with Bars(*columns, console=Console(file=out)) as bars:  # rich honours NO_COLOR
        yield _Bar(bars, bars.add_task(stage, total=None, note="", peak=size_text(peak_bytes())), peak_bytes)


@dataclass(frozen=True)
class _Bar:
    bars: "Bars"
    task: "TaskID"
    peak_bytes: Callable[[], int]

    def update(self, done: int, total: int, note: str) -> None:
        peak = size_text(self.peak_bytes())
        self.bars.update(self.task, completed=done, total=total, note=one_line(note), peak=peak)

    def log(self, text: str) -> None:
        self.bars.console.print(printable(text), markup=False, emoji=False, highlight=False)


class _LogLines:
    """One line per update, at most one every few seconds; the first and the last always show."""

    def __init__(
        self, stage: str, out: TextIO, peak_bytes: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self.stage = stage
        self.out = out
        self.peak_bytes = peak_bytes
        self.clock = clock
        self.started_s = clock()
        self.shown_s = float("-inf")

    def update(self, done: int, total: int, note: str) -> None:
        now = self.clock()
        if now - self.shown_s < LOG_INTERVAL_S and done < total:
            return
        self.shown_s = now
        elapsed_s = now - self.started_s
        left = f", {duration_text(elapsed_s / done * (total - done))} left" if done else ""
        self.log(
            f"{self.stage} {done}/{total} {note}: {duration_text(elapsed_s)} elapsed{left}, peak "
            f"{size_text(self.peak_bytes())}"
        )

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # who watched is gone; the work goes on
            print(printable(text), file=self.out, flush=True)
