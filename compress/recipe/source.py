"""YAML 1.2 text read into plain values, with the line and column of every key.

The values are built from the parser's event stream, not by its object constructor, so the whole language of
recipes is on this page: mappings with unique text keys, lists, and the scalars of the YAML 1.2 core
schema (plus `_` between digits). No tags, anchors, aliases, merge keys or second documents: nothing in a
file refers to something else, and `no`, `off` and `2026-01-31` are text.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scanner import Scanner, ScannerError

from compress.errors import RecipeError, StorageError
from compress.untrusted.files import read_bytes

KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: Mapping[str, bool | None] = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.title(), word.upper())
}
MAX_BYTES = 1 << 19
"""Longest file: the parser takes up to 3 us for each character."""
_MAX_DEPTH = 64
_MAX_VALUES = 5000
"""Values and keys of a file: the parser takes up to 0.2 ms for each, and the largest recipe has fifty."""
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that come in by escapes, which no path and no name can have."""
_MAX_DIGITS = (
    400  # the longest float that repr gives has 24 characters; integers beyond 4,300 digits make int() fail
)


@dataclass(frozen=True)
class Position:
    """A place in a file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class SourceMap:
    """The position of every key and list item of a mapping; `prefix` is the path of this mapping in the whole
    file, and `note` ends every error.
    """

    file: str
    positions: Mapping[KeyPath, Position]
    prefix: KeyPath = ()
    note: str = ""

    def at(self, path: KeyPath) -> Position:
        """Return the position of `path`, or of its nearest parent that the file has."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, Position(1, 1))

    def under(self, *path: str | int) -> "SourceMap":
        """Return the part below `path`, with paths relative to it."""
        depth = len(path)
        inner = {
            known[depth:]: position for known, position in self.positions.items() if known[:depth] == path
        }
        return SourceMap(self.file, {(): self.at(path)} | inner, self.prefix + path, self.note)

    def error(self, path: KeyPath, problem: str) -> RecipeError:
        """Return the error `file:line:column: <key path>: problem`."""
        position = self.at(path)
        name = path_text(self.prefix + path)
        sentence = f"{name + ': ' if name else ''}{problem}{self.note}"
        return RecipeError(f"{self.file}:{position.line}:{position.column}: {sentence}")


def read_source(path: Path, *, file: str, what: str, hint: str) -> str:
    """Return the text of a recipe or data card; `what` and `hint` are words of the error.

    Raises:
        RecipeError: it is no plain file, too long, not UTF-8, or cannot be read.
    """
    try:
        return read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{file}:1:1: not UTF-8 text (byte {error.start}). Save the {what} as UTF-8."
        ) from None
    except StorageError as error:
        raise RecipeError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"{file}: cannot read the {what}: {reason}. {hint}") from error


def read_yaml(text: str, *, file: str) -> tuple[Any, SourceMap]:
    """Return the value of a YAML 1.2 document and the positions of its keys and items; an empty document is
    `None`.

    Raises:
        RecipeError: it is not YAML, or uses more of YAML than this module's head allows.
    """
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{file}:1:1: {len(text):,} characters; at most {MAX_BYTES:,} are read.")
    reader = _Reader(text, file)
    return reader.document(), SourceMap(file, reader.positions)


def dump_yaml(value: Any) -> str:
    """Block YAML of plain data, in the order given; `read_yaml` gives the same value back. Text is quoted, so
    nothing can be misread.
    """
    out = io.StringIO()
    _write_block(out, value, indent=0)
    return out.getvalue()


class _Scanner(Scanner):
    """Refuses nested brackets while it scans: before the first event the parser looks ahead at all of them,
    in time that grows with the square of their depth."""

    def fetch_flow_collection_start(self, *token: Any, **opening: Any) -> None:
        if len(self.flow_context) > 2 * _MAX_DEPTH:  # the reader has a better message for less
            mark = self.reader.get_mark()
            raise ScannerError(problem=f"nested more than {_MAX_DEPTH} levels deep", problem_mark=mark)
        super().fetch_flow_collection_start(*token, **opening)


class _Reader:
    """Builds plain values from parser events, noting positions on the way."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.text = text.removeprefix("\ufeff")
        self.positions: dict[KeyPath, Position] = {}
        self._num_values = 0
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Scanner
        self.events: Iterator[Event] = yaml.parse(self.text)

    def document(self) -> Any:
        self._next()  # start of the stream
        start = self._next()
        if isinstance(start, StreamEndEvent):
            return None
        if isinstance(start, DocumentStartEvent) and (start.tags or start.version not in (None, (1, 2))):
            raise self._error(start.start_mark, "directives are not read here; a recipe is YAML 1.2.")
        first = self._next()
        self.positions[()] = _position(first.start_mark)
        value = self._value(first, ())
        end = self._next()
        assert isinstance(end, DocumentEndEvent)
        after = self._next()
        if not isinstance(after, StreamEndEvent):
            raise self._error(after.start_mark, "a second document starts here; a file holds one.")
        return value

    def _value(self, event: Event, path: KeyPath) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise self._error(event.start_mark, f"more than {_MAX_VALUES:,} values.")
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._error(event.start_mark, "anchors and aliases are not read here; write the value out.")
        if (tag := getattr(event, "tag", None)) is not None:
            raise self._error(
                event.start_mark,
                f"the tag '{tag}' is not read here; values are plain text, numbers, lists and mappings.",
            )
        if len(path) > _MAX_DEPTH:
            raise self._error(event.start_mark, f"nested more than {_MAX_DEPTH} levels deep.")
        if isinstance(event, ScalarEvent):
            self._check_text(event)
            return self._scalar(event) if event.style is None else event.value
        return self._mapping(path) if isinstance(event, MappingStartEvent) else self._list(path)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._next(), MappingEndEvent):
            if (
                not isinstance(event, ScalarEvent)
                or event.anchor is not None
                or event.tag is not None
                or not event.value
            ):
                raise self._error(event.start_mark, "a key is one plain word or text.")
            self._check_text(event)
            key = event.value
            if key == "<<" and event.style is None:
                raise self._error(event.start_mark, "merge keys are not read here; write the values out.")
            if key in mapping:
                first = self.positions[(*path, key)]
                raise self._error(
                    event.start_mark,
                    f"{path_text((*path, key))}: duplicate key, first given at line {first.line}.",
                )
            self.positions[(*path, key)] = _position(event.start_mark)
            mapping[key] = self._value(self._next(), (*path, key))
        return mapping

    def _list(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._next(), SequenceEndEvent):
            inner = (*path, len(items))
            self.positions[inner] = _position(event.start_mark)
            items.append(self._value(event, inner))
        return items

    def _check_text(self, event: ScalarEvent) -> None:
        if found := _NOT_TEXT.search(event.value):
            raise self._error(
                event.start_mark, f"the character {ascii(found[0])[1:-1]} is not text; remove it."
            )

    def _scalar(self, event: ScalarEvent) -> str | int | float | bool | None:
        text = event.value
        if text in _WORDS:
            return _WORDS[text]
        if len(text) > _MAX_DIGITS and (_INT.fullmatch(text) or _FLOAT.fullmatch(text)):
            raise self._error(
                event.start_mark, f"a number of {len(text)} characters; quote it if it is text."
            )
        if _INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            if re.fullmatch(r"[-+]?0[0-9_]+", text):
                raise self._error(
                    event.start_mark,
                    f"{text} starts with 0: quote it if it is text, write 0o for octal, or drop the zero.",
                )
            if abs(number := float(text)) != float("inf"):
                return number
        elif not _NOT_FINITE.fullmatch(text):
            return text
        raise self._error(event.start_mark, f"{text} is not a finite number; quote it if it is text.")

    def _next(self) -> Event:
        try:
            return next(self.events)
        except MarkedYAMLError as error:
            problem = error.problem or "not YAML"
            if "'\\t'" in problem:
                problem = "a tab where YAML wants spaces"
            context = f" {error.context}" if error.context and "next token" not in error.context else ""
            raise self._error(error.problem_mark or error.context_mark, f"{problem}{context}.") from None
        except ReaderError as error:
            before = self.text[: error.position]
            line = before.count("\n") + 1
            column = error.position - (before.rfind("\n") + 1) + 1
            raise RecipeError(
                f"{self.file}:{line}:{column}: a control character is not text; remove it."
            ) from None
        except YAMLError as error:
            raise RecipeError(f"{self.file}:1:1: not YAML: {error}") from None

    def _error(self, mark: StreamMark | None, problem: str) -> RecipeError:
        position = _position(mark) if mark is not None else Position(1, 1)
        return RecipeError(f"{self.file}:{position.line}:{position.column}: {problem}")


def _position(mark: StreamMark) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def path_text(path: KeyPath) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _write_block(out: io.StringIO, value: Any, *, indent: int) -> None:
    """Write nested collections one level further in; a list's dashes are indented two more than the key that
    the list belongs to.
    """
    if isinstance(value, Mapping) and value:
        rows = [(_key_head(str(key), indent), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        rows = [("-", inner) for inner in value]
    else:
        out.write(f"{' ' * indent}{_scalar_text(value)}\n")
        return
    for head, inner in rows:
        if isinstance(inner, (Mapping, list, tuple)) and inner:
            out.write(f"{' ' * indent}{head}\n")
            _write_block(out, inner, indent=indent + 2)
        else:
            out.write(f"{' ' * indent}{head} {_scalar_text(inner)}\n")


def _key_head(key: str, indent: int) -> str:
    """`key:`; a key whose text passes YAML's limit for the short form (1,024 characters) takes the explicit
    one.
    """
    text = key if re.fullmatch(r"[A-Za-z_][\w.-]*", key, re.ASCII) else _quoted(key)
    return f"{text}:" if len(text) < 1000 else f"? {text}\n{' ' * indent}:"


def _scalar_text(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, str):
        return _quoted(value)
    return json.dumps(value, allow_nan=False)


def _quoted(text: str) -> str:
    """Return text in double quotes, in ASCII. YAML has eight digits for what JSON writes as a pair of
    surrogates."""
    parts = (f"\\U{ord(char):08x}" if char > "\uffff" else json.dumps(char)[1:-1] for char in text)
    return f'"{"".join(parts)}"'
