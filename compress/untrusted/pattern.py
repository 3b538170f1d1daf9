"""Regular expressions that somebody else wrote, with limits that keep matching a name short.

Python's matcher tries every way in which repeats can share a text, so `(a+)+b` takes 2^n steps for n
characters, and so does `(|.)` written n times. A pattern that passes has no repeat and no choice inside a
repeat, and few of both.
"""

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the one parser that reads what `re` reads
from typing import Any

MAX_LENGTH = 1000
MAX_REPEATS = 4
MAX_CHOICES = 4
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> re.Pattern[str]:
    """Return a pattern that takes milliseconds for a name.

    Raises:
        ValueError: it is no regular expression, or over a limit; the message is a clause.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has {len(text):,} characters, more than {MAX_LENGTH:,}")
    try:
        repeats, choices = _counts(_parser.parse(text), within=False)
        if repeats > MAX_REPEATS:
            raise ValueError(f"it has {repeats} repeats, more than {MAX_REPEATS}")
        if choices > MAX_CHOICES:
            raise ValueError(f"it has {choices} choices, more than {MAX_CHOICES}")
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression ({error})") from None


def _counts(tree: Any, *, within: bool) -> tuple[int, int]:
    """Count the repeats and the choices of a parsed pattern; `within` a repeat there may be neither."""
    repeats = choices = 0
    for operation, argument in tree:
        name = str(operation)
        if within and (name in _REPEATS or name == "BRANCH"):
            raise ValueError("it has a repeat or a choice within a repeat")
        repeats += name in _REPEATS
        choices += name == "BRANCH"
        parts = argument if isinstance(argument, tuple) else (argument,)
        for part in parts:
            for each in part if isinstance(part, list) else (part,):
                if isinstance(each, _parser.SubPattern):
                    inner = _counts(each, within=within or name in _REPEATS)
                    repeats += inner[0]
                    choices += inner[1]
    return repeats, choices
