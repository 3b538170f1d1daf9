"""Files of rows in columns, csv and parquet, read row by row."""

import csv
from collections.abc import Collection, Iterator
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
    csv.field_size_limit(MAX_LINE_CHARS)  # of the whole process; the default is 131,072 characters
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


def parquet_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row of a parquet file, from 1, and its values by column: of `columns`, as far
    as the file has them. Other columns are not read, and are None in every row.

    Raises:
        StorageError: the file is no parquet file, or damaged.
        UsageError: a text is too long or not UTF-8, a value is none that Python holds, or two columns have
            one name.
    """
    import pyarrow  # comes with `datasets`; slow to import, and only these cards need it
    from pyarrow import parquet

    try:
        with open_plain(path) as file:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            wanted = [name for name in dict.fromkeys(names) if name in columns]
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise UsageError(f"{path}: two columns are named '{twice[0]}'; give each its own name.")
            num_before = 0
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
                values = {name: _values(batch.column(name), name, path, num_before) for name in wanted}
                for idx in range(batch.num_rows):
                    row = dict.fromkeys(names) | {name: each[idx] for name, each in values.items()}
                    num_before += 1
                    yield num_before, row
    except (OSError, pyarrow.ArrowException) as error:
        raise StorageError(f"{path}: cannot be read as parquet: {error}") from error


def _values(column: Any, name: str, path: Path, num_before: int) -> list[Any]:
    """Return the values of a column of a batch, before which the file has `num_before` rows."""
    values = []
    for row_idx, each in enumerate(column, start=num_before + 1):
        try:
            value = each.as_py()
        except (ValueError, OverflowError, LookupError) as error:
            problem = (
                "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error}"
            )
            raise UsageError(f"{path}:{row_idx}: '{name}' {problem}. Mend the row or leave it out.") from None
        if isinstance(value, str) and len(value) > MAX_LINE_CHARS:
            raise UsageError(
                f"{path}:{row_idx}: '{name}' has more than {MAX_LINE_CHARS:,} characters; cut the text into "
                "documents."
            )
        values.append(value)
    return values
