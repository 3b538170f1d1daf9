"""Cron expressions against a reading of crontab(5) minute by minute, and as calendar events of systemd."""

import datetime
import os
import random
import shutil
import subprocess

import pytest

from compress.errors import UsageError
from compress.schedule.cron_expression import parse_cron
from compress.schedule.systemd import calendar_events

NAMES = {
    name: str(value)
    for names, first in (
        ("jan feb mar apr may jun jul aug sep oct nov dec", 1),
        ("sun mon tue wed thu fri sat", 0),
    )
    for value, name in enumerate(names.split(), first)
}
EXPRESSIONS = [
    "0 3 * * *",
    "*/15 3 * * mon-fri",
    "5,35 */6 * * *",
    "0 0 1,15 * *",
    "30 4 1-7 jan-mar *",
    "0 12 13 * 5",  # either
    "0 0 * * 0",
    "0 0 * * 7",
    "0 0 * * fri-sun",
    "0 0 1-31 * 1",  # either, and the first is every day
    "0 0 29 2 *",
    "0 8-18/2 * 6,9,12 1,3,5",
    "7 1 31 * *",
    "*/20 22-23 28-31 * *",
    "1-59/7 0 1-31/10 * *",
]
START = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)


def in_field(word: str, value: int, low: int, high: int) -> bool:
    for item in word.split(","):
        bounds, _, step = item.partition("/")
        first, _, last = bounds.partition("-")
        if bounds == "*":
            first, last = str(low), str(high)
        last = last or first
        if int(first) <= value <= int(last) and (value - int(first)) % int(step or 1) == 0:
            return True
    return False


def matches(text: str, when: datetime.datetime) -> bool:
    """Read an expression as crontab(5) has it."""
    words = text.lower().split()
    for name, value in NAMES.items():
        words = [word.replace(f"-{name}", "-7") if name == "sun" else word for word in words]
        words = [word.replace(name, value) for word in words]
    minute, hour, day, month, weekday = words
    of_week = when.isoweekday() % 7
    fits = (
        in_field(day, when.day, 1, 31),
        in_field(weekday, of_week, 0, 6) or (of_week == 0 and in_field(weekday, 7, 8, 8)),
    )
    restricted = (day != "*", weekday != "*")
    return (
        in_field(minute, when.minute, 0, 59)
        and in_field(hour, when.hour, 0, 23)
        and in_field(month, when.month, 1, 12)
        and (any(fits) if all(restricted) else all(fits))
    )


def times(text: str, *, days: int) -> list[datetime.datetime]:
    """Return the times of the first days of 2027 that match, looking at each minute of a day that does."""
    day = datetime.timedelta(days=1)
    minute, hour, *dates = text.split()
    fitting = [
        START + idx * day for idx in range(days) if matches(f"* * {' '.join(dates)}", START + idx * day)
    ]
    minutes = [datetime.timedelta(minutes=idx) for idx in range(24 * 60)]
    of_day = [each for each in minutes if matches(f"{minute} {hour} * * *", START + each)]
    return [date + each for date in fitting for each in of_day]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_what_is_written_out_matches_the_same_minutes(text: str) -> None:
    written = str(parse_cron(text))
    assert parse_cron(written) == parse_cron(text)
    assert times(written, days=100) == times(text, days=100)
    assert set(written) <= set("0123456789*/,- ")


def drawn_field(rng: random.Random, low: int, high: int) -> str:
    """Return a field: any value, or a list of values, ranges and steps."""
    if rng.random() < 0.2:
        return "*"
    items = []
    for _ in range(rng.randint(1, 3)):
        first, last = sorted((rng.randint(low, high), rng.randint(low, high)))
        items.append(rng.choice([str(first), f"{first}-{last}", f"{first}-{last}/{rng.randint(1, high)}"]))
    return ",".join(items)


@pytest.mark.parametrize("seed", range(100))
def test_any_expression_is_written_out_to_the_same_values(seed: int) -> None:
    rng = random.Random(seed)
    limits = ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))
    text = " ".join(drawn_field(rng, low, high) for low, high in limits)
    found = parse_cron(text)
    assert parse_cron(str(found)) == found
    words = text.split()
    assert found.minutes == tuple(value for value in range(60) if in_field(words[0], value, 0, 59))
    assert found.hours == tuple(value for value in range(24) if in_field(words[1], value, 0, 23))
    assert found.months == tuple(value for value in range(1, 13) if in_field(words[3], value, 1, 12))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("@daily", "0 0 * * *"),
        ("@Weekly", "0 0 * * 0"),
        ("*/5 * * * *", "*/5 * * * *"),
        ("0 0 */2 * *", "0 0 1-31/2 * *"),
        ("0 0 * * 5-7", "0 0 * * 0,5,6"),
        ("00 03 * * *", "0 3 * * *"),
    ],
)
def test_one_expression_has_one_form(text: str, written: str) -> None:
    assert str(parse_cron(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        *("", "0 3 * *", "0 3 * * * *", "60 * * * *", "* 24 * * *", "0 0 0 * *", "0 0 * 13 *", "0 0 * * 8"),
        *("@reboot", "@dayly", "0 3 L * *", "0 3 ? * *", "0 3 * * 1#2", "0 3 1W * *", "5/15 * * * *"),
        *("10-5 * * * *", "*/0 * * * *", "*/61 * * * *", "0 0 */2 * 1", "0 0 1 * */2", "0 0 31 2 *"),
        *("0 0 30,31 feb *", "a * * * *", "-1 * * * *", "1,,2 * * * *", "0 3 * * mon-sat-1", "٣ * * * *"),
    ],
)
def test_what_schedulers_read_differently_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be used") as caught:
        parse_cron(text)
    assert caught.value.where == "--schedule"


def test_the_shortest_gap_sees_the_next_hour() -> None:
    gaps = {"0,58 * * * *": 2, "0,58 3 * * *": 58, "*/5 * * * *": 5, "0 3 * * *": 60, "1,59 0,23 * * *": 2}
    assert {text: parse_cron(text).shortest_gap_minutes for text in gaps} == gaps


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_timer_elapses_when_cron_would_run(text: str) -> None:
    expected = times(text, days=100)[:20] if text != "0 0 29 2 *" else []
    events = calendar_events(parse_cron(text), "UTC")
    shown = subprocess.run(
        [
            "systemd-analyze",
            "calendar",
            "--iterations=20",
            f"--base-time={START - datetime.timedelta(seconds=1):%F %T} UTC",
            *events,
        ],
        env={**os.environ, "TZ": "UTC"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [line for line in shown.splitlines() if "Next elapse:" in line or "Iter." in line]
    stamps = {" ".join(line.split()[-3:-1]) for line in lines}
    elapses = sorted(datetime.datetime.fromisoformat(f"{stamp}+00:00") for stamp in stamps)
    if text == "0 0 29 2 *":
        assert elapses[0] == datetime.datetime(2028, 2, 29, tzinfo=datetime.UTC)
    assert elapses[: len(expected)] == expected
