"""A Jinja sandbox for chat templates that ends: what runs is bounded in steps, and what it makes in size.

Jinja's own sandbox keeps a template away from the program's objects; it does not keep one from counting to
10^10 or from writing a text of ten gigabytes. Here every line that runs counts as a step, and every operation
that could make something large is asked how large first.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_SIZE = 1 << 24
"""Longest text or list that one operation may make, in characters or items."""
MAX_NUMBER = 1_000_000
"""Largest number that may be given to a function, a filter or a power."""
_WIDTH = re.compile(r"\d{7,}")


class _Generator(CodeGenerator):
    """Compiles `a ~ b` into a call that is asked for its size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits; going over one raises SecurityError, a template error."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals.pop("lipsum", None)
        self.filters = {name: _limited(filter_) for name, filter_ in self.filters.items()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_numbers((left, right))
            if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
                _check_size(left.bit_length() * abs(right) // 64)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * max(0, times))
            if isinstance(left, int) and isinstance(right, int):
                _check_size((left.bit_length() + right.bit_length()) // 64)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_numbers(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_numbers((*args, *kwargs.values()))
            name = getattr(obj, "__name__", "")
            if name in ("format", "format_map"):
                _check_format(owner)
            if name == "join" and args and hasattr(args[0], "__len__"):
                _check_size(len(owner) * len(args[0]))
            if name == "replace" and len(args) > 1:
                _check_size(_replaced_size(owner, str(args[0]), str(args[1])))
        return super().call(context, obj, *args, **kwargs)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Return the texts of `parts` as one, as Jinja's `~` does."""
        texts = [str(each) for each in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


@contextmanager
def limited_steps(limit: int = MAX_STEPS) -> Iterator[None]:
    """Raise SecurityError in the block after it ran `limit` lines of Python, those of a template included."""
    left = limit

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


def _limited(filter_: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(filter_, "__name__", "")

    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[1:], *kwargs.values()))  # the first is the value, or what Jinja passes along
        texts = [each for each in args if isinstance(each, str)]
        if name == "do_format":
            _check_numbers(args)
            for each in texts:
                _check_format(each)
        if name == "do_replace" and len(texts) > 2:
            _check_size(_replaced_size(*texts[:3]))
        return filter_(*args, **kwargs)

    return call


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _check_numbers(values: tuple[Any, ...]) -> None:
    for each in values:
        if isinstance(each, int) and abs(each) > MAX_NUMBER:
            raise SecurityError(f"it gives a number above {MAX_NUMBER:,} to an operation")


def _check_format(text: str) -> None:
    if "%" in text or "{" in text:
        widths = [part for part in re.split(r"[%{]", text)[1:] if _WIDTH.match(part.lstrip("-+ #:<>=^0."))]
        if widths:
            raise SecurityError("it asks for a field of a million characters")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"it makes a text or list longer than {MAX_SIZE:,}")
