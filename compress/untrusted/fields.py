"""Fields of a JSON object that somebody else wrote, read by the type and the range that the reader declares.

A reader makes one `Fields` of the object and reads each field from it; what has another type, or
lies outside the range, is refused with the name and the value, before anything of that size is made.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compress.errors import CompressError


class Fields:
    """One object; `where` names it in errors, and `refusal` makes an error of a sentence. Errors name the
    fields in `written_as`, which were renamed before, as they are written in the object.

    `null` counts as a field that is absent: a reader that has a default takes it then.
    """

    def __init__(
        self,
        value: Any,
        where: str,
        refusal: Callable[[str], CompressError],
        *,
        written_as: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self._refusal = refusal
        self._written_as = written_as or {}
        if not isinstance(value, Mapping):
            raise refusal(f"{where} is {shown(value)}, not a JSON object.")
        self._values: Mapping[str, Any] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def has(self, name: str) -> bool:
        """Return whether there is a field of that name that is not `null`."""
        return self._values.get(name) is not None

    def is_list(self, name: str) -> bool:
        """Return whether a field is a list, where several types are read."""
        return isinstance(self._values.get(name), list)

    def is_flag(self, name: str) -> bool:
        """Return whether a field is true or false, where several types are read."""
        return isinstance(self._values.get(name), bool)

    def is_integer(self, name: str) -> bool:
        """Return whether a field is a whole number, where several types are read."""
        return type(self._values.get(name)) is int

    def integer(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        """Return a whole number from `low` to `high`; a truth value is none, nor is 4.0."""
        value = self._value(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, value, f"a whole number from {low:,} to {high:,}")
        return value

    def number(self, name: str, low: float, high: float, *, default: float | None = None) -> float:
        """Return a finite number from `low` to `high`, as a float."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Return `true` or `false`."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return a text."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def texts(self, name: str, *, default: Sequence[str] | None = None) -> list[str]:
        """Return a list of texts."""
        value = self._value(name, default)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, value, "a list of texts")
        return list(value)

    def integers(self, name: str, low: int, high: int) -> list[int]:
        """Return a list of whole numbers from `low` to `high`."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(
            type(each) is int and low <= each <= high for each in value
        ):
            raise self.wrong(name, value, f"a list of whole numbers from {low:,} to {high:,}")
        return value

    def numbers(self, name: str, low: float, high: float) -> list[float]:
        """Return a list of finite numbers from `low` to `high`, as floats."""
        values = self.items(name)
        odd = [each for each in values if type(each) not in (int, float) or not low <= each <= high]
        if odd:
            raise self.wrong(name, odd[0], f"a list of numbers from {low:g} to {high:g}")
        return [float(value) for value in values]

    def items(self, name: str, *, default: Sequence[Any] | None = None) -> list[Any]:
        """Return a list of anything."""
        value = self._value(name, default)
        if not isinstance(value, list | tuple):
            raise self.wrong(name, value, "a list")
        return list(value)

    def mapping(self, name: str, *, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return an object as it is."""
        value = self._value(name, default)
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "a JSON object")
        return value

    def fields(self, name: str, *, default: Mapping[str, Any] | None = None) -> "Fields":
        """Return an object as `Fields` of its own."""
        where = f"{self._name(name)} of {self.where}"
        return Fields(self.mapping(name, default=default), where, self._refusal)

    def wrong(self, name: str, value: Any, wanted: str) -> CompressError:
        """Return the error for a field whose value is not what is wanted."""
        return self._refusal(f"{self.where} has {self._name(name)} = {shown(value)}; it must be {wanted}.")

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._refusal(f"{self.where} has no field '{self._name(name)}'.")
        return value

    def _name(self, name: str) -> str:
        return self._written_as.get(name, name)


def shown(value: Any) -> str:
    """Return a value as an error shows it: one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
