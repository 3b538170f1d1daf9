"""Files of rows in columns, csv and parquet, read row by row."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.data.text_files import MAX_LINE_CHARS, text_lines
from compress.errors import StorageError, UsageError
from compress.untrusted.files import open_plain

_ROWS_AT_ONCE = 1024


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row of a csv file (RFC 4180), from 1, and its fields by the names in the
    header; all are text. The file may be packed as other text is.

    Raises:
        UsageError: it is no csv file, or a row has other fields than the header.
        StorageError: the file cannot be read to its end.
    """
    reader = csv.reader(text_lines(path), strict=True)
    try:
        names = next(reader, None)
        if not names or len(set(names)) < len(names) or "" in names:
            raise UsageError(f"{path}: the first line of a csv file has the names of its fields, each once.")
        for row_idx, values in enumerate(reader, start=1):
            if not values:
                continue
            if len(values) != len(names):
                raise UsageError(
                    f"{path}:{row_idx}: the row has {len(values)} fields and the header {len(names)}."
                )
            yield row_idx, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise UsageError(f"{path}: not a csv file: {error}, at line {reader.line_num}.") from None


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row of a parquet file, from 1, and its values by column.

    Raises:
        StorageError: the file is no parquet file, or damaged.
        UsageError: a text is too long.
    """
    import pyarrow  # comes with `datasets`; slow to import, and only these cards need it
    from pyarrow import parquet

    try:
        with open_plain(path) as file:
            row_idx = 0
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    row_idx += 1
                    for name, value in row.items():
                        if isinstance(value, str) and len(value) > MAX_LINE_CHARS:
                            raise UsageError(
                                f"{path}:{row_idx}: '{name}' has more than {MAX_LINE_CHARS:,} characters; "
                                "cut the text into documents."
                            )
                    yield row_idx, row
    except (OSError, pyarrow.ArrowException) as error:
        raise StorageError(f"{path}: cannot be read as parquet: {error}") from error
