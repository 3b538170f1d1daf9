"""GitHub Actions: a workflow that runs in an image with `compress`, at its times (UTC) and by hand.

Runners keep nothing, so the workspace travels through the cache of Actions, and report and lock file are kept
as an artifact of the workflow. `${{` in a value would begin an expression; it is written as one that gives
the text itself.
"""

from typing import Any

from compress.errors import UsageError
from compress.recipe import dump_yaml
from compress.schedule.scheduled_run import ScheduledRun
from compress.schedule.target import TARGETS, ScheduleFile

_SHORTEST_MINUTES = 5
_MINUTES_A_JOB = 360


class GitHub:
    """The target `github`."""

    takes = frozenset({"schedule", "timezone", "image", "runners"})
    needs = frozenset({"image"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the workflow. Raises UsageError as the protocol states."""
        triggers: dict[str, Any] = {"workflow_dispatch": {}}
        if run.timezone not in (None, "UTC"):
            raise UsageError(
                f"--timezone {run.timezone}: times of GitHub Actions are UTC; write the schedule in UTC.",
                where="--timezone",
            )
        if run.schedule is not None:
            if run.schedule.shortest_gap_minutes < _SHORTEST_MINUTES:
                raise UsageError(
                    f"--schedule '{run.schedule}': GitHub Actions start at most every "
                    f"{_SHORTEST_MINUTES} minutes.",
                    where="--schedule",
                )
            triggers["schedule"] = [{"cron": str(run.schedule)}]
        document = {
            "name": run.name,
            "on": triggers,
            "permissions": {"contents": "read"},
            "concurrency": {"group": f"compress-{run.name}", "cancel-in-progress": False},
            "jobs": {
                "compress": {
                    "runs-on": [_plain(each) for each in run.runners] or "ubuntu-latest",
                    "container": {"image": _plain(run.image or "")},
                    "timeout-minutes": _MINUTES_A_JOB,
                    "steps": _steps(run),
                }
            },
        }
        header = f"# .github/workflows/{run.name}.yaml\n"
        return (ScheduleFile(f"{run.name}.yaml", header + dump_yaml(document)),)


def _steps(run: ScheduledRun) -> list[dict[str, Any]]:
    kept = f"compress-{run.name}-"
    return [
        {"uses": "actions/checkout@v5"},
        {
            "uses": "actions/cache@v4",
            "with": {"path": ".compress", "key": kept + "${{ github.run_id }}", "restore-keys": kept},
        },
        {"name": "Run the recipe", "run": _plain(run.command())},
        {
            "name": "Keep report and lock file",
            "if": "always()",
            "uses": "actions/upload-artifact@v4",
            "with": {"name": run.name, "path": "runs", "if-no-files-found": "ignore"},
        },
    ]


def _plain(text: str) -> str:
    """Return text in which nothing is an expression."""
    return text.replace("${{", "${{ '${{' }}")


TARGETS.add("github", GitHub())
