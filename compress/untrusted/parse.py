"""JSON that somebody else wrote, with limits that ordinary documents never reach.

A document that passes can be walked by recursion, written again as UTF-8 JSON and compared: it is nested at
most `MAX_DEPTH` deep, every number is finite, every text is Unicode without lone surrogates, and no object
has a name twice.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from compress.untrusted.files import read_bytes

MAX_DEPTH = 64
MAX_DIGITS = 640
"""Longest integer, in digits: above it Python may refuse to print the number again."""
MAX_DOCUMENT_BYTES = 256 << 20


class Malformed(ValueError):
    """A text that is not JSON within the limits; the message is a clause without a full stop, such as "it is
    nested more than 64 deep"."""


def parse_json(data: bytes | str, *, as_python: bool = False, spells_constants: bool = False) -> Any:
    """Return the value of one JSON document. With `as_python` NaN, half surrogates and repeated names pass,
    as Python and many data sets write them; depth and length of numbers are limited all the same. With
    `spells_constants` Infinity comes as `{"__float__": "Infinity"}`, which is how `transformers` 5 writes
    what it wrote as Python does before.

    Raises:
        Malformed: it is not JSON (RFC 8259), not UTF-8, or over a limit.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        if as_python:
            value = json.loads(text, parse_int=_integer)
        else:
            value = json.loads(
                text,
                object_pairs_hook=_unique,
                parse_constant=_spelled if spells_constants else _no_constant,
                parse_int=_integer,
            )
    except RecursionError:
        raise Malformed(f"it is nested more than {MAX_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8 text (byte {error.start})") from None
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(str(error)) from None
    may_have_surrogates = not as_python and ("\\u" in text or not isinstance(data, bytes))
    _check(value, may_have_surrogates=may_have_surrogates, finite=not as_python)
    return value


def read_json(path: Path, *, max_bytes: int = MAX_DOCUMENT_BYTES, spells_constants: bool = False) -> Any:
    """Return the value of a JSON file, `spells_constants` as in `parse_json`.

    Raises:
        Malformed: it is not JSON within the limits.
        StorageError: it is no plain file, or longer than `max_bytes`.
        OSError: it cannot be read.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), spells_constants=spells_constants)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise Malformed(f"the name {name!r:.80} occurs twice in one object")
        value[name] = each
    return value


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is not a number of JSON")


def _spelled(name: str) -> dict[str, str]:
    return _no_constant(name) if name == "NaN" else {"__float__": name}


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Malformed(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _check(value: Any, *, may_have_surrogates: bool, finite: bool) -> None:
    """Check depth, numbers and texts, level by level instead of by recursion."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Malformed(f"it is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for each in level:
            parts = each
            if isinstance(each, Mapping):
                if may_have_surrogates:
                    for name in each:
                        _check_text(name)
                parts = each.values()
            elif not isinstance(each, list):
                parts = (each,)
            for part in parts:
                if isinstance(part, dict | list):
                    below.append(part)
                elif isinstance(part, float):
                    if finite and not math.isfinite(part):
                        raise Malformed("a number is too large for a float")
                elif may_have_surrogates and isinstance(part, str):
                    _check_text(part)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"the text {text!r:.80} has half a surrogate pair") from None
