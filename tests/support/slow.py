"""Cases that repeat at other sizes what their neighbours show: `make test` leaves them out, and
`make test-slow` runs them."""

from typing import Any

import pytest


def slow(*values: object, **options: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
