r"""systemd: a service that runs once, and the timer that starts it (systemd.service(5), systemd.timer(5)).

Quoting of systemd.syntax(7) and systemd.service(5): a value is in double quotes with `\` and `"` escaped,
`%` is doubled everywhere, and `$` in arguments. The path of the program is not expanded and may not have
quotes or backslashes, so those and `$` are refused there.

A run that ends with 5, 75 or 143 is tried again after ten minutes until it ends in another way; systemd would
count starts by the timer against a limit of tries.

A cron day that may match by day of month or by day of week becomes two `OnCalendar=` lines, of which one is
enough (systemd.time(7)).
"""

import re

from compress.errors import UsageError
from compress.schedule.cron_expression import CronExpression, runs_of
from compress.schedule.scheduled_run import (
    FINAL_EXIT_CODES,
    RETRY_MINUTES,
    STOP_SECONDS,
    ScheduledRun,
)
from compress.schedule.target import TARGETS, ScheduleFile

_PLAIN = re.compile(r"[A-Za-z0-9_./:-]+")
_NAMES = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Systemd:
    """The target `systemd`."""

    takes = frozenset({"schedule", "timezone", "workdir"})
    needs = frozenset({"schedule", "workdir"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the service and the timer. Raises UsageError as the protocol states."""
        assert run.schedule is not None
        service = _unit(
            f"{run.name}.service: both units go to ~/.config/systemd/user; then\n"
            f"# `systemctl --user daemon-reload && systemctl --user enable --now {run.name}.timer`, and\n"
            "# `loginctl enable-linger`, so that it runs without a session. The log is that of\n"
            f"# `journalctl --user -u {run.name}`. In /etc/systemd/system the service needs a line User=.",
            Unit={"Description": f"compress run of {run.name}", "StartLimitIntervalSec": "0"},
            Service={
                "Type": "oneshot",
                "WorkingDirectory": _directory(run.directory),
                "ExecStart": " ".join([_program(run.program), *map(_argument, run.words()[1:])]),
                "Restart": "on-failure",
                "RestartSec": f"{RETRY_MINUTES}min",
                "RestartPreventExitStatus": " ".join(map(str, (1, *FINAL_EXIT_CODES))),
                "TimeoutStopSec": f"{STOP_SECONDS}s",
            },
        )
        timer = _unit(
            f"{run.name}.timer",
            Unit={"Description": f"compress run of {run.name}, at its times"},
            Timer={"OnCalendar": calendar_events(run.schedule, run.timezone), "Persistent": "true"},
            Install={"WantedBy": "timers.target"},
        )
        return ScheduleFile(f"{run.name}.service", service), ScheduleFile(f"{run.name}.timer", timer)


def calendar_events(schedule: CronExpression, timezone: str | None = None) -> tuple[str, ...]:
    """Return the calendar events that elapse when the cron expression matches: one, or two of which one is
    enough where days of the month and of the week are both restricted.
    """
    months = _part(schedule.months, 1, 12)
    time = f"{_part(schedule.hours, 0, 23)}:{_part(schedule.minutes, 0, 59)}:00"
    zone = "" if timezone is None else f" {timezone}"
    dates = []
    if schedule.days is not None:
        dates.append(f"*-{months}-{_part(schedule.days, 1, 31)}")
    if schedule.weekdays is not None:
        dates.append(f"{_weekdays(schedule.weekdays)} *-{months}-*")
    return tuple(f"{date} {time}{zone}" for date in dates or [f"*-{months}-*"])


def _part(values: tuple[int, ...], low: int, high: int) -> str:
    if len(values) == high - low + 1:
        return "*"
    return ",".join(
        f"{first:02d}" if first == last else f"{first:02d}..{last:02d}" for first, last in runs_of(values)
    )


def _weekdays(values: tuple[int, ...]) -> str:
    from_monday = tuple(sorted((value - 1) % 7 for value in values))
    return ",".join(
        _NAMES[first] if first == last else f"{_NAMES[first]}..{_NAMES[last]}"
        for first, last in runs_of(from_monday)
    )


def _unit(comment: str, **sections: dict[str, str | tuple[str, ...]]) -> str:
    """Return a unit file; a setting with several values is written once for each."""
    lines = [f"# {comment}"]
    for section, settings in sections.items():
        lines += ["", f"[{section}]"]
        for key, value in settings.items():
            lines += [f"{key}={each}" for each in ((value,) if isinstance(value, str) else value)]
    return "\n".join(lines) + "\n"


def _argument(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if _PLAIN.fullmatch(text) else f'"{escaped}"'


def _program(path: str) -> str:
    if any(character in path for character in "\\\"'$"):
        raise UsageError(
            f"--executable {path}: systemd takes no program with a quote, a backslash or a $ in its path.",
            where="--executable",
        )
    return f'"{path.replace("%", "%%")}"'


def _directory(path: str) -> str:
    if "\\" in path:
        raise UsageError(
            f"--workdir {path}: systemd takes no directory with a backslash in its path.", where="--workdir"
        )
    return path.replace("%", "%%")


TARGETS.add("systemd", Systemd())
