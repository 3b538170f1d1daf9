"""Files of text, packed or not, that are read line by line."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from compress.errors import StorageError, UsageError
from compress.untrusted.files import open_plain
from compress.untrusted.parse import Malformed, parse_json

MAX_LINE_CHARS = 1 << 25
"""Longest line that is read: the whole of some encyclopedia's longest article fits hundreds of times, and a
packed file of a kilobyte cannot fill the memory."""
_MAX_LINE_BYTES = 4 * MAX_LINE_CHARS  # a character of UTF-8 has at most four


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line of a jsonl file that is not empty, from 1, and its object.

    Raises:
        UsageError: a line is not an object of JSON, or not UTF-8.
        StorageError: the file cannot be read to its end.
    """
    for row_idx, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, as_python=True)
        except Malformed as error:
            raise UsageError(f"{path}:{row_idx}: not a JSON row: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{row_idx}: a row of a jsonl file is an object.")
        yield row_idx, row


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, unpacked where its suffix is `.xz`, `.gz`, `.bz2` or `.zst`. A
    byte-order mark at its beginning, which spreadsheets write, is no text.

    Raises:
        UsageError: the text is not UTF-8, or a line is too long.
        StorageError: it is no plain file, or cannot be read to its end.
    """
    try:
        with open_plain(path) as packed, _unpacked(packed, path.suffix) as stream:
            beginning = codecs.BOM_UTF8
            for line_idx in count(1):
                line = stream.readline(_MAX_LINE_BYTES + 1)
                if not line:
                    return
                at = f"{path}:{line_idx}"
                is_short = len(line) <= _MAX_LINE_BYTES
                text = _decoded(line.removeprefix(beginning), at) if is_short else ""
                beginning = b""
                if not is_short or len(text) > MAX_LINE_CHARS:
                    raise UsageError(
                        f"{at}: the line has more than {MAX_LINE_CHARS:,} characters; cut the text into "
                        "documents."
                    )
                yield text
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise StorageError(
            f"{path}: cannot be read to the end: {error}. The file may be cut off or not what its suffix "
            "says."
        ) from error


def _decoded(line: bytes, at: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: {error.reason} (byte {error.start + 1} of the line)"
        raise UsageError(f"{at}: {problem}. Data files are UTF-8.") from None


def _unpacked(packed: BinaryIO, suffix: str) -> BinaryIO:
    match suffix:
        case ".xz":
            return cast(BinaryIO, lzma.open(packed))
        case ".gz":
            return cast(BinaryIO, gzip.open(packed))
        case ".bz2":
            return cast(BinaryIO, bz2.open(packed))
        case ".zst":
            import pyarrow  # comes with `datasets`; the standard library of Python 3.11 cannot read zstd

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed), "zstd")
            return io.BufferedReader(stream)  # which it cannot do itself: read a line
    return packed
