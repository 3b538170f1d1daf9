"""Traces: arrivals and lengths of requests that somebody recorded, as CSV or as JSON lines.

    timestamp,prompt_tokens,output_tokens          a CSV file with this header, columns in any order
    {"timestamp": 0.25, "prompt_tokens": 374, "output_tokens": 44}        a line of a JSONL file

A timestamp is a number of seconds or a date and time such as `2023-11-16 18:15:46.6805900`; only differences
count. The columns TIMESTAMP, ContextTokens and GeneratedTokens of the Azure LLM inference traces are read as
they are. Other columns are passed over. Rows must be in the order of their timestamps. A file whose name ends
in .xz or .gz is decompressed.
"""

import csv
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from compress.errors import UsageError
from compress.untrusted.fields import shown
from compress.untrusted.files import open_plain
from compress.untrusted.parse import Malformed, parse_json
from compress.validate.load.lengths import Lengths

MAX_TRACE_BYTES = 256 << 20
MAX_TOKENS = 1 << 24
_COLUMNS = {
    "timestamp": ("timestamp", "TIMESTAMP"),
    "prompt_tokens": ("prompt_tokens", "ContextTokens"),
    "output_tokens": ("output_tokens", "GeneratedTokens"),
}
"""Names that a column may have in a file."""


@dataclass(frozen=True)
class Trace:
    """Requests of a trace: `arrivals_s` in seconds after the first."""

    name: str
    arrivals_s: tuple[float, ...]
    lengths: Lengths


def read_trace(path: Path, *, num_requests: int | None = None, rate_scale: float = 1.0) -> Trace:
    """Return the first `num_requests` of a trace (None: all), arriving `rate_scale` times as fast as
    recorded.

    Raises:
        UsageError: the file is no trace, a row is malformed, or `rate_scale` is not a positive number.
    """
    if not 0 < rate_scale < math.inf:
        raise UsageError(f"the rate of a trace is scaled by a positive number, not by {rate_scale:g}.")
    times_s: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for place, row in islice(_rows(path), num_requests):
        time_s = _seconds(row["timestamp"], place)
        if times_s and time_s < times_s[-1]:
            raise UsageError(
                f"{place}: this request arrives before the one above it; sort the trace by time."
            )
        times_s.append(time_s)
        prompts.append(_count(row["prompt_tokens"], "prompt tokens", place))
        outputs.append(_count(row["output_tokens"], "output tokens", place))
    if not times_s:
        raise UsageError(f"{path} has no requests.")
    arrivals_s = tuple((each - times_s[0]) / rate_scale for each in times_s)
    return Trace(path.name, arrivals_s, Lengths(tuple(prompts), tuple(outputs)))


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, for errors, and its values under the names of `_COLUMNS`."""
    text = _text(path)
    name = path.name.removesuffix(".xz").removesuffix(".gz")
    rows = _json_rows(path, text) if name.endswith((".jsonl", ".json")) else _csv_rows(path, text)
    for place, row in rows:
        found = {column: _column(row, column, place) for column in _COLUMNS}
        yield place, found


def _text(path: Path) -> str:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix)
    try:
        with open_plain(path) as plain, plain if opener is None else opener(plain) as stream:
            data: bytes = stream.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UsageError(f"the trace {path} cannot be read: {error}.") from None
    if len(data) > MAX_TRACE_BYTES:
        raise UsageError(f"the trace {path} has more than {MAX_TRACE_BYTES:,} bytes; cut it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from None


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: this line is no CSV: {error}.") from None


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = parse_json(line)
        except Malformed as error:
            raise UsageError(f"{place}: this line is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise UsageError(f"{place}: this line is {shown(row)}, not a JSON object.")
        yield place, row


def _column(row: Mapping[str, Any], column: str, place: str) -> Any:
    for name in _COLUMNS[column]:
        if row.get(name) is not None:
            return row[name]
    names = " or ".join(f"'{name}'" for name in _COLUMNS[column])
    raise UsageError(f"{place}: there is no {names}; a trace has a time, prompt tokens and output tokens.")


def _seconds(value: Any, place: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _from_date(value, place)
    if not math.isfinite(seconds) or isinstance(value, bool):
        raise UsageError(f"{place}: the timestamp is {shown(value)}, not a finite number of seconds.")
    return seconds


def _from_date(value: Any, place: str) -> float:
    """Return seconds of a date and time; digits beyond microseconds, which Python does not read, are
    added.
    """
    text = str(value).strip()
    head, point, tail = text.partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(head + tail[len(digits) :])
    except ValueError:
        raise UsageError(
            f"{place}: the timestamp is {shown(value)}; write seconds, or a date and time such as "
            "2023-11-16 18:15:46.68."
        ) from None
    fraction = float(f"0.{digits}") if point and digits else 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() + fraction


def _count(value: Any, noun: str, place: str) -> int:
    try:
        count = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_TOKENS:
        raise UsageError(
            f"{place}: {noun} is {shown(value)}; it must be a whole number from 1 to {MAX_TOKENS:,}."
        )
    return count
