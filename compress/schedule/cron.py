"""Cron: one line of a crontab (crontab(5)), which writes the JSON document and a log into
its directory.

    minute hour day month weekday  cd DIRECTORY && { RUN; keep the document; message on failure; exit; }

The document gets its name when the run has ended, so a run that ends at once because another one holds the
workspace cannot cut the other's document short. Cron mails what the line prints, which is one sentence when
the run ended with another code than 0. Its shell is /bin/sh. A `%` ends the command unless a backslash
precedes it, so each gets one; programs differ on other backslashes, which are refused. Overlap needs no lock
here: the second run ends with 75.
"""

import shlex

from compress.errors import UsageError
from compress.schedule.scheduled_run import ScheduledRun
from compress.schedule.target import TARGETS, ScheduleFile

_MAX_COMMAND = 998
"""Longest command of Debian's cron (MAX_COMMAND is 1000)."""


class Cron:
    """The target `cron`."""

    takes = frozenset({"schedule", "workdir"})
    needs = frozenset({"schedule", "workdir"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the crontab line. Raises UsageError as the protocol states."""
        assert run.program
        document = f".{run.name}.$$.json"
        message = f'echo "compress: {run.name} ended with exit code $code; see {run.name}.log"'
        command = (
            f"cd {shlex.quote(run.directory)} && {{ {run.command('--json')} > {document} 2>> {run.name}.log; "
            f"code=$?; mv -f {document} {run.name}.json; [ $code -eq 0 ] || {message}; exit $code; }}"
        )
        if "\\" in command:
            raise UsageError("a path has a backslash, which programs of cron read in different ways.")
        escaped = command.replace("%", "\\%")
        if len(escaped.encode()) > _MAX_COMMAND:
            raise UsageError(
                f"the command has {len(escaped.encode())} bytes, and cron takes {_MAX_COMMAND}; choose "
                "shorter paths."
            )
        text = (
            f"# {run.name}.cron: add this line with `crontab -e`. Times are those of the machine.\n"
            f"{run.schedule}  {escaped}\n"
        )
        return (ScheduleFile(f"{run.name}.cron", text),)


TARGETS.add("cron", Cron())
