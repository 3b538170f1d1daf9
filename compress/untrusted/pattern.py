"""Regular expressions that somebody else wrote, with limits that keep matching a name short.

Python's matcher tries every way in which repeats can share a text, so `(a+)+b` takes 2^n steps for n
characters. A pattern that passes has no repeat inside a repeat, no choice inside one, and few of them.
"""

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the one parser that reads what `re` reads
from typing import Any

MAX_LENGTH = 1000
MAX_REPEATS = 5
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
        count = _num_repeats(_parser.parse(text), within=False)
        if count > MAX_REPEATS:
            raise ValueError(f"it has {count} repeats, more than {MAX_REPEATS}")
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression ({error})") from None


def _num_repeats(tree: Any, *, within: bool) -> int:
    """Count the repeats of a parsed pattern; `within` one there may be neither a repeat nor a choice."""
    count = 0
    for operation, argument in tree:
        name = str(operation)
        if within and (name in _REPEATS or name == "BRANCH"):
            raise ValueError("it has a repeat or a choice within a repeat")
        count += name in _REPEATS
        parts = argument if isinstance(argument, tuple) else (argument,)
        for part in parts:
            for each in part if isinstance(part, list) else (part,):
                if isinstance(each, _parser.SubPattern):
                    count += _num_repeats(each, within=within or name in _REPEATS)
    return count
