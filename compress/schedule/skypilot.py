"""SkyPilot: a task for `sky jobs launch`, which finds a machine and takes the place of one that was lost.

SkyPilot has no clock: another scheduler launches the task. Exit codes 5, 75 and 143 are tried again, and so
is a machine that was taken away, for which the workspace must lie on a volume. The first word of a run is a
shell command, so quoting is that of a shell.
"""

import re
from typing import Any

from compress.errors import UsageError
from compress.recipe import dump_yaml
from compress.schedule.scheduled_run import MAX_RETRIES, RETRIED_EXIT_CODES, ScheduledRun
from compress.schedule.target import TARGETS, ScheduleFile


class SkyPilot:
    """The target `skypilot`."""

    takes = frozenset({"workdir", "image", "gpus", "volumes"})
    needs = frozenset({"image"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the task. Raises UsageError as the protocol states."""
        resources: dict[str, Any] = {"image_id": f"docker:{run.image}"}
        if run.gpus is not None:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(:[1-9][0-9]*)?", run.gpus):
                raise UsageError(
                    f"--gpus {run.gpus}: give skypilot the kind and the number, such as H100:1.",
                    where="--gpus",
                )
            resources["accelerators"] = run.gpus
        resources["job_recovery"] = {
            "max_restarts_on_errors": MAX_RETRIES,
            "recover_on_exit_codes": list(RETRIED_EXIT_CODES),
        }
        document: dict[str, Any] = {
            "name": run.name,
            "workdir": run.workdir or ".",
            "resources": resources,
        }
        if run.volumes:
            document["volumes"] = {volume.path: volume.claim for volume in run.volumes}
        document["run"] = run.command()
        header = f"# {run.name}.yaml: `sky jobs launch {run.name}.yaml`\n"
        return (ScheduleFile(f"{run.name}.yaml", header + dump_yaml(document)),)


TARGETS.add("skypilot", SkyPilot())
