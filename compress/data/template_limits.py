"""A Jinja sandbox for chat templates that ends: what runs is bounded in steps, and what it makes in size.

Jinja's own sandbox keeps a template away from the program's objects; it does not keep one from counting to
10^10 or from writing a text of ten gigabytes. Here every line that runs counts as a step, and before every
operation that could make something large the size of its result is bounded by what it is given.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_SIZE = 1 << 24
"""Longest text or list that one operation may make, in characters or items."""
MAX_TOTAL = 1 << 27
"""Largest sum of what the operations of one rendering make."""
MAX_NUMBER = 1_000_000
"""Largest number that may be given to a function, a filter or a power."""
MAX_BITS = 1 << 14
"""Length of the largest number that arithmetic may make."""
_total: ContextVar[list[int]] = ContextVar("total")
"""The size of all that the operations of this rendering have made so far, in a list of one number."""
_DIGITS = re.compile(r"\d+")
_NESTED = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")
"""A width that is a field itself, `%*d` or `{:{}}`."""
_TEXT_FILTERS = frozenset(
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint"}
    | {"replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode"}
    | {"urlize", "wordcount", "wordwrap", "xmlattr"}
)
"""Filters that write their value as a text, a list or an object whole."""
_LIST_FILTERS = frozenset(
    {"batch", "dictsort", "groupby", "items", "list", "reverse", "slice", "sort", "unique"}
)
"""Filters that make a list as long as their value."""


class _Generator(CodeGenerator):
    """Compiles `a ~ b`, `a[b:c]` and comparisons into calls that look at sizes first."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.sliced(")
            self.visit(node.node, frame)
            self.write(")[")
            self.visit(node.arg, frame)
            self.write("]")
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._visit_sized(node.expr, frame)
        for operand in node.ops:
            self.write(f" {_OPERATORS[operand.op]} ")
            self._visit_sized(operand.expr, frame)
        self.write(")")

    def _visit_sized(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.sized(")
        self.visit(node, frame)
        self.write(")")


_OPERATORS = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<="} | {
    "in": "in",
    "notin": "not in",
}


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits; going over one raises SecurityError, a template error."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self.sized, **options)
        self.globals.pop("lipsum", None)
        self.filters = {name: _limited(name, filter_) for name, filter_ in self.filters.items()}

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Add a filter, or replace one, under the same limits."""
        self.filters[name] = _limited(name, filter_)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Return the pieces of a template, a macro or a block as one text."""
        pieces, size = _measured(parts)
        _spend(size)
        return "".join(pieces)

    @staticmethod
    def sized(value: Any) -> Any:
        """Return the value, if it is not too large to be written or compared."""
        if isinstance(value, list | tuple | Mapping):
            _text_size(value)
        return value

    @staticmethod
    def sliced(value: Any) -> Any:
        """Return a value of which a slice is taken."""
        if hasattr(value, "__len__"):
            _spend(len(value))
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Return the texts of `parts` as one, as Jinja's `~` does."""
        _spend(_text_size(parts))
        return "".join(str(each) for each in parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_numbers((left, right))
            if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
                _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    _spend(len(value) * max(0, times))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator in "+-" and isinstance(left, int) and isinstance(right, int):
            _check_bits(max(left.bit_length(), right.bit_length()))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _spend(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args, kwargs = _check_method(owner, getattr(obj, "__name__", ""), args, kwargs)
        return super().call(context, obj, *args, **kwargs)


@contextmanager
def limited_steps(limit: int = MAX_STEPS) -> Iterator[None]:
    """Raise SecurityError in the block after it ran `limit` lines of Python, those of a template included, or
    made more than `MAX_TOTAL`."""
    left = limit
    total = _total.set([0])

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise SecurityError(f"it runs more than {limit:,} steps")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        _total.reset(total)


def _check_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check a call of a method of `text`, and return the arguments with what can be walked once as a list."""
    values = (*args, *kwargs.values())
    _check_numbers(values)
    _spend(len(text))
    if name == "translate":
        raise SecurityError("it calls translate, whose result may have any length")
    if name in ("format", "format_map"):
        _check_format(text, values)
    elif name == "join" and args:
        items, size = _measured(args[0])
        _spend(size + len(text) * len(items))
        args = (items,)
    elif name == "replace" and len(args) > 1:
        _spend(_replaced_size(text, str(args[0]), str(args[1])))
    elif name == "expandtabs":
        _spend(len(text) + text.count("\t") * _largest_number(values, default=8))
    return args, kwargs


def _limited(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        passed = [each for each in args if not isinstance(each, Context | EvalContext | LimitedEnvironment)]
        value = passed[0] if passed else ""
        options = (*passed[1:], *kwargs.values())
        _check_numbers(options)
        if name == "join":
            attribute = kwargs.pop("attribute", passed[2] if len(passed) > 2 else None)
            if attribute is not None:
                value = map(make_attrgetter(args[0].environment, attribute), value)
            items, size = _measured(value)
            separator = str(kwargs.get("d", passed[1] if len(passed) > 1 else ""))
            _spend(size + len(separator) * len(items))
            return filter_(args[0], items, separator)
        if name in _LIST_FILTERS and hasattr(value, "__len__"):
            _spend(len(value))
        if name not in _TEXT_FILTERS:
            return filter_(*args, **kwargs)
        size = _text_size(value)
        _spend(size)
        longest = max((len(each) for each in options if isinstance(each, str)), default=0)
        if name == "format":
            _check_format(str(value), options)
        elif name == "replace" and len(options) > 1:
            _spend(_replaced_size(str(value), str(options[0]), str(options[1])))
        elif name == "indent":
            num_lines = str(value).count("\n") + 1
            _spend(size + num_lines * max(longest, _largest_number(options, default=4)))
        elif name == "tojson":
            _spend(size * (1 + max(longest, _largest_number(options, default=0))))
        elif name == "wordwrap":
            _spend(size * (1 + longest))
        return filter_(*args, **kwargs)

    return call


def _text_size(value: Any) -> int:
    """Return about how many characters a value has as a text, at least as many as its parts have.

    Raises:
        SecurityError: too many.
    """
    size = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, int):
            size += each.bit_length() // 3
        size += 2
        _check_size(size + len(waiting))
    return size


def _measured(values: Iterable[Any]) -> tuple[list[Any], int]:
    """Return values as a list, with their size as texts; stops where they become too large."""
    items = []
    size = 0
    for each in values:
        size += len(each) if isinstance(each, str) else _text_size(each)
        _check_size(size)
        items.append(each)
    return items, size


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _largest_number(values: Iterable[Any], *, default: int) -> int:
    return max((abs(each) for each in values if isinstance(each, int)), default=default)


def _check_numbers(values: Iterable[Any]) -> None:
    if _largest_number(values, default=0) > MAX_NUMBER:
        raise SecurityError(f"it gives a number above {MAX_NUMBER:,} to an operation")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise SecurityError(f"it makes a number longer than {MAX_BITS:,} bits")


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    """Check `%` and `format`. A field is at most as long as a width in the text and all values are; a width
    that is itself a field (`*`, `{:{}}`) may be any number among the values."""
    num_fields = text.count("%") + text.count("{")
    if num_fields == 0:
        return
    widths = sum(int(digits[:9]) for digits in _DIGITS.findall(text))
    numbers = _largest_number(values, default=0) if _NESTED.search(text) else 0
    _spend(len(text) + widths + num_fields * (_text_size(values) + numbers))


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"it makes a text or list longer than {MAX_SIZE:,}")


def _spend(size: int) -> None:
    """Count what an operation is about to make."""
    _check_size(size)
    total = _total.get()
    total[0] += size
    if total[0] > MAX_TOTAL:
        raise SecurityError(f"its texts and lists are longer than {MAX_TOTAL:,} together")
