"""The end of a process between two file operations, as far as one process can play it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(call: int) -> Iterator[list[int]]:
    """Raise `Killed` at each call that changes the file system, from one on; yield the number of calls."""
    count = [0]

    def dying(real: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] > call:
                raise Killed
            return real(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, dying(getattr(os, name)))
        yield count
