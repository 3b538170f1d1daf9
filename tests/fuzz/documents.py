"""Forms of input and their mutations.

A form's `mutate` returns another input, made of one and of a pool of others, by a `random.Random` alone;
`parts` yields smaller variants of an input, for the minimiser. JSON is kept as lists of pairs, so that a name
may occur twice, and hostile values are written as they are, so that NaN and half surrogates come through.
"""

import json
import random
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_BYTES = (1 << 20) - 1
"""Largest input: the law holds below 1 MiB."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its names and values, in order; a name may occur twice."""


class Raw(str):
    """JSON text that is written as it is."""


class Form(Protocol):
    """How a kind of input is mutated and made smaller."""

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes: ...

    def parts(self, data: bytes) -> Iterator[bytes]: ...


HOSTILE_JSON = tuple(
    Raw(text)
    for text in (
        *("null", "true", "false", "-1", "0", "1", "2", "-0.0", "0.5", "1.0", "1e308", "1e999", "-1e999"),
        *(
            "NaN",
            "Infinity",
            "-Infinity",
            "2147483648",
            str(2**63),
            str(-(2**63) - 1),
            str(2**64),
            str(10**30),
        ),
        *("9" * 700, "9" * 5000, "1000000", "1" + "0" * 18, "1e-320"),
        *(
            '""',
            '" "',
            '"true"',
            '"no"',
            '"1"',
            '"-1"',
            '"nan"',
            '"\\ud800"',
            '"\\udc00\\ud800"',
            '"\\u0000"',
        ),
        *(
            '"\\u001b]0;title\\u0007\\u001b[2J"',
            '"\\u009b2J"',
            '"\\u202e\\u2066"',
            '"\\n---\\n"',
            '"a\\r\\nb"',
        ),
        *(
            '"' + "x" * 5000 + '"',
            '"' + "é" * 300 + '"',
            '"' + "a/" * 3000 + 'a"',
            '"\\\\"',
            '"{}"',
            '"%s%n{0}"',
        ),
        *(
            '"../../etc/passwd"',
            '"/etc/passwd"',
            '"/dev/zero"',
            '"."',
            '".."',
            '"a//b"',
            '"~"',
            '"re:("',
            '"re:(a+)+$"',
        ),
        *("[]", "{}", "[[]]", "[null]", "[0]", "[-1]", '[""]', "[{}]", '{"": null}', '{"a": {"b": {}}}'),
        *("[0, 9223372036854775808]", "[1e999]", "[[[[[[[[]]]]]]]]", "[" * 70 + "]" * 70),
        *("[" * 3000 + "]" * 3000, "[" * 100_000 + "]" * 100_000, '{"a":' * 2000 + "0" + "}" * 2000),
        *("[" + "0," * 5000 + "0]", '["' + '","' * 2000 + '"]'),
    )
)
HOSTILE_NAMES = (
    "",
    "\x1b[2J",
    "__class__",
    "__metadata__",
    "a" * 3000,
    "\u202e",
    "../x",
    "self",
    "kind",
    "é",
    "*",
)


def read_pairs(text: str) -> Any:
    """Return a JSON value with its objects as `Pairs`; ValueError or RecursionError where it is none."""
    return json.loads(text, object_pairs_hook=Pairs)


@dataclass(frozen=True)
class Json:
    """JSON documents; `canonical` ones have the bytes of a manifest: sorted, one space of indent."""

    canonical: bool = False

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
        value = self.value(data)
        if value is None or rng.random() < 0.08:
            return mutate_bytes(data, pool, rng)
        others = [
            other for other in (self.value(each) for each in rng.sample(pool, min(2, len(pool)))) if other
        ]
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            value = mutate_value(value, others, rng)
        changed = self.text(value).encode("utf-8", "surrogatepass")
        return mutate_bytes(changed, pool, rng) if rng.random() < 0.05 else changed

    def parts(self, data: bytes) -> Iterator[bytes]:
        value = self.value(data)
        if value is not None:
            for smaller in smaller_values(value):
                yield self.text(smaller).encode("utf-8", "surrogatepass")
        else:
            yield from smaller_bytes(data)

    def value(self, data: bytes) -> Any:
        """Return the value of a document, None where it is no JSON object or list."""
        try:
            value = read_pairs(data.decode())
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, list) else None

    def text(self, value: Any) -> str:
        return write(value, sort=True, indent=1) + "\n" if self.canonical else write(value)


@dataclass(frozen=True)
class JsonLines:
    """One JSON object a line."""

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
        lines = data.splitlines()
        if not data.startswith(b"{") or rng.random() < 0.1:
            return mutate_bytes(data, pool, rng)
        idx = rng.randrange(len(lines))
        return b"\n".join([*lines[:idx], Json().mutate(lines[idx], lines, rng), *lines[idx + 1 :], b""])

    def parts(self, data: bytes) -> Iterator[bytes]:
        lines = data.splitlines()
        if not data.startswith(b"{"):
            yield from smaller_bytes(data)
            return
        for idx in range(len(lines) if len(lines) > 1 else 0):
            yield b"\n".join([*lines[:idx], *lines[idx + 1 :], b""])
        for idx, line in enumerate(lines):
            for smaller in Json().parts(line):
                yield b"\n".join([*lines[:idx], smaller, *lines[idx + 1 :], b""])


@dataclass(frozen=True)
class Safetensors:
    """Safetensors files: their header is mutated as JSON, and its length mostly made to fit."""

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
        header, content = _split(data)
        if rng.random() < 0.1:
            return mutate_bytes(data, pool, rng)
        header = Json().mutate(header, [_split(each)[0] for each in pool], rng)
        num_bytes = (
            len(header) if rng.random() < 0.93 else rng.choice((0, 1, 2**32, 2**63, 2**64 - 1, 99_999_999))
        )
        if rng.random() < 0.15:
            content = content[: rng.randrange(len(content) + 1)] + bytes(rng.choice((0, 1, 8, 64)))
        return struct.pack("<Q", num_bytes) + header + content

    def parts(self, data: bytes) -> Iterator[bytes]:
        header, content = _split(data)
        fits = data[:8] == struct.pack("<Q", len(header))
        for smaller in Json().parts(header) if fits else ():
            yield struct.pack("<Q", len(smaller)) + smaller + content
        for fewer in smaller_bytes(content) if content else ():
            yield data[:8] + header + fewer
        if not fits:
            yield from smaller_bytes(data)


@dataclass(frozen=True)
class Yaml:
    """YAML of recipes and cards, mutated line by line and scalar by scalar."""

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
        if rng.random() < 0.06:
            return mutate_bytes(data, pool, rng)
        lines = data.decode("utf-8", "replace").split("\n")
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            lines = _mutate_lines(lines, pool, rng)
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def parts(self, data: bytes) -> Iterator[bytes]:
        lines = data.split(b"\n")
        for count in (8, 4, 2, 1):
            for idx in range(0, len(lines) if len(lines) > 1 else 0, count):
                yield b"\n".join(lines[:idx] + lines[idx + count :])
        yield from smaller_bytes(data)


@dataclass(frozen=True)
class Template:
    """A `tokenizer_config.json` whose chat template is mutated as text too."""

    def mutate(self, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
        value = Json().value(data)
        if not isinstance(value, Pairs) or rng.random() < 0.4:
            return Json().mutate(data, pool, rng)
        for idx, (name, text) in enumerate(value):
            if name == "chat_template" and isinstance(text, str):
                value[idx] = (name, _mutate_template(text, rng))
        return write(value).encode("utf-8", "surrogatepass")

    def parts(self, data: bytes) -> Iterator[bytes]:
        value = Json().value(data)
        for idx, (name, text) in enumerate(value) if isinstance(value, Pairs) else ():
            if name == "chat_template" and isinstance(text, str):
                for piece in smaller_bytes(text.encode("utf-8", "surrogatepass")):
                    changed = Pairs(value)
                    changed[idx] = (name, piece.decode("utf-8", "replace"))
                    yield write(changed).encode("utf-8", "surrogatepass")
        yield from Json().parts(data)


# ----------------------------------------------------------------------------------------- JSON values


def write(value: Any, *, sort: bool = False, indent: int | None = None, depth: int = 0) -> str:
    """Return JSON text; half surrogates are written as escapes."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    if not isinstance(value, list):
        return json.dumps(value)
    gap = "" if indent is None else "\n" + " " * (indent * (depth + 1))
    end = "" if indent is None else "\n" + " " * (indent * depth)
    inner = {"sort": sort, "indent": indent, "depth": depth + 1}
    if isinstance(value, Pairs):
        rows = sorted(value, key=lambda pair: str(pair[0])) if sort else value
        items = [f"{write(str(name))}: {write(each, **inner)}" for name, each in rows]
        opening, closing = "{}"
    else:
        items = [write(each, **inner) for each in value]
        opening, closing = "[]"
    separator = "," + gap if indent is not None else ", "
    return opening + gap + separator.join(items) + end + closing if items else opening + closing


def places(value: Any) -> list[tuple[list[Any], int]]:
    """Return every place in a value, as its container and index, except within values deeper than 40."""
    found = []
    level: list[Any] = [value]
    for _ in range(40):
        below = []
        for container in level:
            for idx, item in enumerate(container):
                found.append((container, idx))
                inner = item[1] if isinstance(container, Pairs) else item
                if isinstance(inner, list):
                    below.append(inner)
        level = below
    return found


def copied(value: Any) -> Any:
    """Return a copy of a value that shares no container with it."""
    if isinstance(value, Pairs):
        return Pairs((name, copied(inner)) for name, inner in value)
    return [copied(each) for each in value] if isinstance(value, list) else value


def mutate_value(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    """Return a value that differs in one place."""
    value = copied(value)
    found = places(value)
    if not found:
        return rng.choice(others) if others else Pairs([("a", rng.choice(HOSTILE_JSON))])
    container, idx = rng.choice(found)
    named = isinstance(container, Pairs)
    item = container[idx][1] if named else container[idx]

    def put(new: Any) -> None:
        container[idx] = (container[idx][0], new) if named else new

    match rng.choices(range(8), weights=(40, 14, 8, 8, 6, 12, 8, 4))[0]:
        case 0:
            put(rng.choice(HOSTILE_JSON))
        case 1:
            put(_near(item, rng))
        case 2:
            del container[idx]
        case 3:
            container.insert(rng.randrange(len(container) + 1), copied(container[idx]))
        case 4 if named:
            container[idx] = (rng.choice((*HOSTILE_NAMES, rng.choice(found)[0][0])), item)
            if not isinstance(container[idx][0], str):
                container[idx] = ("x", item)
        case 5 | 6:
            source, at = rng.choice(places(rng.choice(others)) or found) if others else rng.choice(found)
            other = source[at]
            if named and isinstance(source, Pairs) and rng.random() < 0.5:
                container.append(copied(Pairs([other]))[0])
            else:
                put(copied(other[1] if isinstance(source, Pairs) else other))
        case _:
            put(Pairs([("a", item)]) if rng.random() < 0.5 else [item, copied(item)])
    return value


def _near(item: Any, rng: random.Random) -> Any:
    """Return a value beside one: another sign, size, type or spelling."""
    if isinstance(item, bool) or item is None:
        return rng.choice((None, True, False, 1, 0, str(item).lower(), [item]))
    if isinstance(item, Raw):
        return rng.choice(HOSTILE_JSON)
    if isinstance(item, int | float):
        return rng.choice(
            (
                -item,
                item + 1,
                item - 1,
                item * 2,
                item * 1000,
                item // 2,
                float(item % 2**64),
                str(item),
                [item],
            )
        )
    if isinstance(item, str):
        if item[:1] in "{[" and len(item) > 2 and rng.random() < 0.7:  # a document within a text
            value = Json().value(item.encode("utf-8", "surrogatepass"))
            if value is not None:
                return write(mutate_value(value, [], rng))
        at = rng.randrange(len(item) + 1)
        return rng.choice(
            (
                item.upper(),
                item[:at],
                item[:at]
                + rng.choice(("\x1b[2J", "\u202e", "\ud800", "\x00", "/../", "\n", "é", '"'))
                + item[at:],
                item * 40,
                [item],
                Pairs([(item, item)]),
            )
        )
    if isinstance(item, Pairs):
        return rng.choice(
            ([inner for _, inner in item], [[name, inner] for name, inner in item], Pairs(item[:1]))
        )
    return rng.choice(
        (Pairs((str(idx), inner) for idx, inner in enumerate(item)), item[:1], item[::-1], item * 3)
    )


def smaller_values(value: Any) -> Iterator[Any]:
    """Yield variants of a value with one place less or one simpler place."""
    count = len(places(value))
    for number in range(count):
        smaller = copied(value)
        container, idx = places(smaller)[number]
        del container[idx]
        yield smaller
    for number in range(count):
        smaller = copied(value)
        container, idx = places(smaller)[number]
        named = isinstance(container, Pairs)
        item = container[idx][1] if named else container[idx]
        for simpler in _simpler(item):
            container[idx] = (container[idx][0], simpler) if named else simpler
            yield smaller


def _simpler(item: Any) -> list[Any]:
    if isinstance(item, list):
        return [type(item)()] if item else []
    if isinstance(item, str) and not isinstance(item, Raw) and len(item) > 1:
        return ["", item[:1], item[: len(item) // 2], item[len(item) // 2 :]]
    return []


# -------------------------------------------------------------------------------------- text and bytes

_SCALARS = (
    *(
        "",
        "~",
        "null",
        "true",
        "no",
        "-1",
        "0",
        "1",
        "0.5",
        "1e999",
        ".nan",
        "-.inf",
        str(2**63),
        "1" + "0" * 30,
    ),
    *(
        "9" * 399,
        "9" * 401,
        "0x" + "f" * 600,
        "0x" + "f" * 300,
        "0o" + "7" * 300,
        "1e-400",
        "-0.0",
        "1_000_000",
    ),
    *(
        '""',
        '"\\ud800"',
        '"\\0"',
        '"\\e[2J"',
        '"\\u202e"',
        '"' + "x" * 5000 + '"',
        "'\u202e'",
        "|",
        ">-",
        "?",
        "- -",
    ),
    *(
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "[[[[]]]]",
        "[" * 70 + "]" * 70,
        "[" * 500 + "]" * 500,
        "{" * 500,
        "[" * 20_000,
    ),
    *(
        "&a 1",
        "*a",
        "!!python/object:os.system x",
        "!!int 1",
        "<<",
        "{<<: {}}",
        "@x",
        "`x`",
        "%x",
        "\t",
        "---",
        "...",
    ),
    *(
        "../../etc/passwd",
        "/dev/zero",
        "/",
        "hf://a/b",
        "hf://a/b@c",
        "builtin://reference",
        "builtin://x",
        "layout://",
    ),
    *(
        "layout://r\\0",
        '"layout://r\\0"',
        '"a\\0b"',
        "a" * 300,
        "a/" * 3000,
        "2026-01-31",
        "12:30:45",
        "1.0",
        "[0]",
        "[-1]",
    ),
)


def _mutate_lines(lines: list[str], pool: Sequence[bytes], rng: random.Random) -> list[str]:
    lines = list(lines)
    idx = rng.randrange(len(lines))
    line = lines[idx]
    match rng.choices(range(9), weights=(40, 10, 6, 6, 6, 6, 12, 4, 10))[0]:
        case 0:
            head, colon, _ = line.partition(": ")
            dash = re.match(r"\s*- ", line)
            lines[idx] = (
                head + colon + rng.choice(_SCALARS)
                if colon
                else (dash[0] if dash else "") + rng.choice(_SCALARS)
            )
        case 1:
            del lines[idx]
        case 2:
            lines.insert(rng.randrange(len(lines) + 1), line)
        case 3:
            lines[idx] = rng.choice((" ", "  ", "\t", "    ")) + line if rng.random() < 0.6 else line.lstrip()
        case 4:
            other = rng.randrange(len(lines))
            lines[idx] = lines[other]
            lines[other] = line
        case 5:
            lines.insert(
                idx,
                rng.choice(("---", "...", "%YAML 1.1", "# x", "&a", "? a", "a: b", "- a", "\x07", "\ufeff")),
            )
        case 6 if pool:
            other_lines = rng.choice(pool).decode("utf-8", "replace").split("\n")
            start = rng.randrange(len(other_lines))
            lines[idx:idx] = other_lines[start : start + rng.choice((1, 1, 2, 4))]
        case 7:
            indent = line[: len(line) - len(line.lstrip())]
            lines.insert(
                idx, indent + rng.choice(("x", "kind", "''", "<<", "?", "a" * 1100, "\u202e")) + ": " + "1"
            )
        case _:  # a scalar anywhere, in flow collections too
            scalars = list(re.finditer(r"[^\s,:{}\[\]-][^,:{}\[\]]*", line))
            if scalars:
                found = rng.choice(scalars)
                lines[idx] = line[: found.start()] + rng.choice(_SCALARS) + line[found.end() :]
    return lines or [""]


_TEMPLATE_PIECES = (
    *(
        "{{ messages }}",
        "{{ messages[0].role.__class__ }}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}",
    ),
    *(
        "{% endfor %}",
        "{% if",
        "%}",
        "{{",
        "}}",
        "{#",
        "{% set x = namespace(a=1) %}",
        "{% set x.a = x %}{{ x }}",
    ),
    *(
        "{{ 1 / 0 }}",
        "{{ 10 ** 30 }}",
        "{{ [] | first }}",
        "{{ messages | tojson }}",
        "{{ none.a.b }}",
        "{{ '%d' % 'a' }}",
    ),
    *(
        "{{ 'a'.format(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ),
    *(
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ strftime_now(1) }}",
        "{{ strftime_now('%') }}",
    ),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% break %}",
        "{% call x %}",
        "{{ self }}",
        "{{ cycler() }}",
        "{{ lipsum() }}",
    ),
    *(
        "{{ bos_token + 1 }}",
        "{{ eos_token * 3 }}",
        "{{ '\\ud800' }}",
        "\x1b[2J",
        "{% raw %}",
        "{{ tools[0] }}",
        "{{ range(10) }}",
    ),
    *(
        "{{ messages | sort }}",
        "{{ messages | map('x') | list }}",
        "{{ 'x' | indent('a') }}",
        "{{ joiner }}",
        "{{ dict(a=1) }}",
    ),
    *(
        "{{ (" * 100 + "1" + ") }}" * 100,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
    ),
)


def _mutate_template(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.choice((0, 0, 1, 3, 10, 40)))
        text = text[:at] + rng.choice((*_TEMPLATE_PIECES, "")) + text[to:]
    return text


def mutate_bytes(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Return `data` with bytes flipped, cut, inserted, repeated or taken from another input."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 16, 64))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice(b'\x00\xff\x80"{}[]:,0-9\n\t\x1b\\')
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = rng.choice(
                    (b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"{", b"[", b"9" * 30)
                )
            case 4:
                out[at:at] = out[at : at + size] * rng.choice((1, 2, 50))
            case 5 if pool:
                other = rng.choice(pool)
                start = rng.randrange(len(other) + 1)
                out[at : at + size] = other[start : start + size]
            case 6 if rng.random() < 0.3:
                del out[at:]
    return bytes(out[:MAX_BYTES])


def smaller_bytes(data: bytes) -> Iterator[bytes]:
    """Yield `data` without one of its pieces, from halves down to single bytes."""
    size = len(data) // 2
    while size:
        for at in range(0, len(data), size):
            yield data[:at] + data[at + size :]
        size //= 2


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Return header and content of a safetensors file, whatever length it announces."""
    size = int.from_bytes(data[:8], "little")
    end = 8 + min(size, len(data))
    return data[8:end], data[end:]
