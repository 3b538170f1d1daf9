"""The interface of a schedule target. A module of this package registers one under its scheduler's name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from compress.errors import UsageError
from compress.plugins import PluginSet
from compress.schedule.scheduled_run import ScheduledRun


@dataclass(frozen=True)
class ScheduleFile:
    """One file for a scheduler: its usual name, and its text, which opens with a comment on its use."""

    name: str
    text: str


class Target(Protocol):
    """A scheduler. `takes` are the options that it has a place for, besides those of every target (recipe,
    name, executable, options of the run), and `needs` those that it cannot do without.
    """

    takes: frozenset[str]
    needs: frozenset[str]

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the scheduler's files; the same run gives the same text.

        Raises:
            UsageError: a value that this scheduler cannot be given.
        """
        ...


TARGETS: PluginSet[Target] = PluginSet("schedule target", "compress.schedule")
OPTIONS: Mapping[str, str] = {
    "schedule": "--schedule",
    "timezone": "--timezone",
    "workdir": "--workdir",
    "image": "--image",
    "gpus": "--gpus",
    "volumes": "--volume",
    "runners": "--runner",
}
"""The fields of a run that only some targets take, and the option of each."""


def render(target: str, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
    """Return the files of a target for a run.

    Raises:
        UsageError: there is no such target, it has no place for an option, needs one more, or cannot be given
            a value.
    """
    found = TARGETS.get(target)
    given = {name for name in OPTIONS if getattr(run, name)}
    if surplus := sorted(OPTIONS[name] for name in given - found.takes):
        taken = ", ".join(sorted(OPTIONS[name] for name in found.takes))
        raise UsageError(
            f"{target} has no place for {', '.join(surplus)}. It takes {taken}.", where=surplus[0]
        )
    if missing := sorted(OPTIONS[name] for name in found.needs - given):
        raise UsageError(f"{target} needs {', '.join(missing)} as well.", where=missing[0])
    return found.render(run)
