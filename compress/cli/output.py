"""Output of commands: data goes to stdout, as text or as one JSON document `{"schema": 1, ...}`; notes and
progress go to stderr.

Progress is a bar where there is a terminal, and otherwise a log line now and then, so that a scheduled job's
log stays readable.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from compress.errors import StorageError

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from compress.context import Progress

SCHEMA = 1
LOG_INTERVAL_S = 5.0

JsonFlag = Annotated[
    bool, typer.Option("--json", help='Print one JSON document {"schema": 1, ...} to stdout.')
]


def emit(document: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a command's result: the document, or its form for people."""
    write_data(
        json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=False, allow_nan=False)
        if as_json
        else text
    )


def write_data(text: str) -> None:
    """Print data to stdout. When its reader has gone, the command ends there, quietly, with exit code 5: not
    all data arrived.
    """
    write_piece(text + "\n")


def write_piece(text: str) -> None:
    """Print a part of the data to stdout at once, with nothing added; a reader that has gone ends the command
    as in `write_data`.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter's own flush at exit must not complain
        raise typer.Exit(StorageError.exit_code) from None


def note(message: str) -> None:
    """Print a line for the person who watches; never data."""
    print(message, file=sys.stderr, flush=True)


def table(rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Return rows as columns padded to their widest cell; those in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
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
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
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
        self.bars.update(self.task, completed=done, total=total, note=note, peak=size_text(self.peak_bytes()))

    def log(self, text: str) -> None:
        self.bars.console.print(text, markup=False)


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
        print(text, file=self.out, flush=True)
