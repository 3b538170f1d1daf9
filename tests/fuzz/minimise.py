"""Delta debugging: a failing input made small."""

import time
from collections.abc import Callable

from tests.fuzz.documents import Form


def minimise(data: bytes, form: Form, fails: Callable[[bytes], bool], *, seconds: float) -> bytes:
    """Return a smaller input for which `fails` holds as it does for `data`, as small as the time allows.

    Every variant of the form with one part less is tried; the first that still fails takes the place of the
    input, and the search goes on from there, until none does.
    """
    ends = time.monotonic() + seconds
    start = 0
    while True:
        found = None
        for number, candidate in enumerate(form.parts(data)):
            if time.monotonic() > ends:
                return data
            if number >= start and len(candidate) < len(data) and fails(candidate):
                data = candidate
                found = number
                break
        if found is None and start == 0:
            return data
        start = found or 0  # parts before this one were tried and are needed, most likely
