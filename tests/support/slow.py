"""Cases that repeat at other sizes what their neighbours show: `make test` leaves them out, and
`make test-slow` runs them, or the part of them that the variable SLOW_PART names (2/4: the third of four)."""

import zlib
from typing import Any

import pytest

PART_VARIABLE = "SLOW_PART"


def slow(*values: object, **options: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def in_part(test: str, part: str) -> bool:
    """Return whether a test, by its id, is in a part of all: each is in one of them."""
    index, _, parts = part.partition("/")
    return zlib.crc32(test.encode()) % int(parts) == int(index)
