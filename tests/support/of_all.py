"""One test of many values: for a check that takes less time than a test of its own."""

from collections.abc import Callable, Iterable
from typing import Any


def of_all(values: Iterable[Any], name: Callable[[Any], str] = str) -> Callable[..., Callable[[], None]]:
    """Return a decorator that makes one test of a check of a value; it names each value that fails."""

    values = list(values)
    assert values, "no value to check"

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for value in values:
                try:
                    check(value)
                except AssertionError as error:
                    failures.append(f"{name(value)}: {error}")
            assert not failures, "\n".join(failures)

        test.__name__ = test.__qualname__ = check.__name__
        test.__doc__ = check.__doc__
        return test

    return decorate
