"""Input that somebody damaged or made up: every reader answers with one sentence of its own, soon."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CompressError

LIMIT_S = 2.0
"""Processor time for one small input; on a shared machine the clock measures its neighbours too."""
NO_NUMBERS: tuple[Any, ...] = ("12", True, [], {}, 1.5, -1, 10**30)
"""Values that are no whole number of anything."""


def refusal(read: Callable[[], object], *, exit_codes: tuple[int, ...] = (2, 5)) -> str:
    """Return the message with which `read` refuses its input; any other end fails the test."""
    begin = time.process_time()
    with pytest.raises(CompressError) as caught:
        read()
    took_s = time.process_time() - begin
    message = str(caught.value)
    assert caught.value.exit_code in exit_codes, (caught.value.exit_code, message)
    assert took_s < LIMIT_S, message
    assert "\n" not in message, message
    assert len(message) < 1000, message
    return message


def make_fifo(path: Path) -> None:
    """Put a FIFO, which nobody writes to, in the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
