"""Cron expressions of five fields, in the subset that every scheduler reads the same way.

    minute 0-59   hour 0-23   day of month 1-31   month 1-12   day of week 0-7 (0 and 7 are Sunday)

A field is `*`, or a list of values, ranges `a-b` and steps `*/n`, `a-b/n`; months and days of the week may be
names. `@daily` and its like are written out. A day matches if day of month and day of week match; where both
are restricted, one of them is enough (POSIX crontab). Programs differ on a step over `*` where both days are
restricted, on `a/n`, `?`, `L`, `W`, `#` and `@reboot`, which are refused.
"""

import re
from dataclasses import dataclass

from compress.errors import UsageError, did_you_mean

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ITEM = re.compile(r"(\*|(?P<first>[a-z0-9]+)(-(?P<last>[a-z0-9]+))?)(/(?P<step>[0-9]+))?")


@dataclass(frozen=True)
class _Field:
    """The limits of a field, the names of its values, and the value of the first name."""

    noun: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    first_name: int = 0


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of month", 1, 31),
    _Field("month", 1, 12, _MONTHS, 1),
    _Field("day of week", 0, 7, _WEEKDAYS),
)


@dataclass(frozen=True)
class CronExpression:
    """The values that match, in each field; `days` and `weekdays` are None where any matches. Weekdays count
    from 0, Sunday, to 6.
    """

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...] | None
    months: tuple[int, ...]
    weekdays: tuple[int, ...] | None

    def __str__(self) -> str:
        """Return the expression in numbers, lists, ranges and steps, as every scheduler reads it."""
        return " ".join(
            (
                _text(self.minutes, 0, 59, "*"),
                _text(self.hours, 0, 23, "*"),
                "*" if self.days is None else _text(self.days, 1, 31, "1-31"),
                _text(self.months, 1, 12, "*"),
                "*" if self.weekdays is None else _list(self.weekdays),
            )
        )

    @property
    def shortest_gap_minutes(self) -> int:
        """The shortest time between two runs of one day, in minutes; 60 or more count as 60."""
        gaps = [after - before for before, after in zip(self.minutes, self.minutes[1:], strict=False)]
        if any((hour + 1) % 24 in self.hours for hour in self.hours):
            gaps.append(60 + self.minutes[0] - self.minutes[-1])
        return min([60, *gaps])


def parse_cron(text: str) -> CronExpression:
    """Return the expression of a text such as `0 3 * * mon-fri` or `@daily`.

    Raises:
        UsageError: it is none, it never comes to pass, or schedulers read it differently.
    """
    words = _MACROS.get(text.strip().lower(), text.lower()).split()
    if len(words) != len(_FIELDS):
        near = did_you_mean(text.strip().lower(), _MACROS) if text.strip().startswith("@") else ""
        raise _error(
            text,
            f"a schedule has five fields, minute hour day month weekday, such as '0 3 * * *'.{near}",
        )
    minutes, hours, days, months, weekdays = (
        _values(text, word, field) for word, field in zip(words, _FIELDS, strict=True)
    )
    any_day = words[2] == "*"
    any_weekday = words[4] == "*"
    if not any_day and not any_weekday and ("*" in words[2] or "*" in words[4]):
        raise _error(
            text,
            "schedulers differ on a step over '*' where day of month and day of week are both given; write "
            "the days as a list or a range.",
        )
    week = tuple(sorted({value % 7 for value in weekdays}))
    if not any_day and not any_weekday and (len(days) == 31 or len(week) == 7):
        any_day = any_weekday = True  # one of the two matches every day, which is enough
    if any_weekday and not any(day <= _DAYS_OF_MONTH[month - 1] for month in months for day in days):
        raise _error(text, "no month that it names has such a day, so it would never run.")
    return CronExpression(minutes, hours, None if any_day else days, months, None if any_weekday else week)


def _values(text: str, word: str, field: _Field) -> tuple[int, ...]:
    found = set[int]()
    for item in word.split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match["step"] and match["first"] and not match["last"]):
            raise _error(
                text,
                f"'{item}' is not a {field.noun} that every scheduler reads: write *, numbers, lists, ranges "
                "a-b, or steps */n and a-b/n.",
            )
        high = field.high - (field.noun == "day of week")
        first = field.low if match["first"] is None else _value(text, match["first"], field)
        last = high if match["first"] is None else first
        if match["last"] is not None:
            last = _value(text, match["last"], field)
            if match["last"] == _WEEKDAYS[0]:
                last = field.high
        if last < first:
            raise _error(text, f"the range '{item}' ends before it begins; write two ranges.")
        step = int(match["step"] or 1)
        if not 1 <= step <= field.high:
            raise _error(text, f"the step of '{item}' is not between 1 and {field.high}.")
        found |= set(range(first, last + 1, step))
    return tuple(sorted(found))


def _value(text: str, word: str, field: _Field) -> int:
    if word in field.names:
        return field.names.index(word) + field.first_name
    if not word.isdigit() or not field.low <= int(word) <= field.high:
        names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise _error(text, f"'{word}' is not a {field.noun}, {field.low} to {field.high}{names}.")
    return int(word)


def _error(text: str, problem: str) -> UsageError:
    return UsageError(f"the schedule '{text}' cannot be used: {problem}", where="--schedule")


def _text(values: tuple[int, ...], low: int, high: int, every: str) -> str:
    """Return a field; `every` is how all values are written."""
    if len(values) == high - low + 1:
        return every
    step = values[1] - values[0] if len(values) > 2 else 1
    if step > 1 and values == tuple(range(low, high + 1, step)):
        return f"{every}/{step}"
    return _list(values)


def _list(values: tuple[int, ...]) -> str:
    return ",".join(
        str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first},{last}"
        for first, last in runs_of(values)
    )


def runs_of(values: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and the last value of each run of consecutive values, in their order."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs
