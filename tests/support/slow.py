"""Cases that repeat at other sizes what their neighbours show: `make test` leaves them out, and
`make test-slow` runs them, or the part of them that the variable SLOW_PART names (2/4: the third of four),
which `make test` then runs with its own.

A case is marked by `slow`, a test by `pytest.mark.slow`, and of a test with many costly cases
`pytest.mark.one_in(4)` leaves the first and about a quarter of the others to `make test`."""

import zlib
from collections.abc import Iterable
from typing import Any

import pytest

PART_VARIABLE = "SLOW_PART"


def slow(*values: object, **options: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def in_part(test: str, part: str) -> bool:
    """Return whether a test, by its id, is in a part of all: each is in one of them."""
    index, _, parts = part.partition("/")
    return _number_of(test) % int(parts) == int(index)


def mark_slow_cases(items: Iterable[Any]) -> None:
    """Mark the cases that `one_in` leaves out. Which ones these are follows from their ids, so a case that is
    added changes none but itself."""
    seen = set()
    for item in items:
        chosen = item.get_closest_marker("one_in")
        if chosen is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if test in seen and _number_of(f"one in {item.nodeid}") % chosen.args[0]:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def _number_of(text: str) -> int:
    return zlib.crc32(text.encode())
