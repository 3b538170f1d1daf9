"""Kubernetes: a CronJob (batch/v1) with a schedule, and without one a Job.

Exit codes of the run decide by `podFailurePolicy` (stable since Kubernetes 1.31): 2, 3 and 4 fail the Job at
once; 5, 75 and 143 count as tries, up to `backoffLimit`; a pod that the cluster itself disrupts does not
count. What is tried again resumes where the workspace lies on a volume. `$(NAME)` in a command would be
replaced by Kubernetes, so each `$` is doubled.
"""

import re
from typing import Any

from compress.errors import UsageError
from compress.recipe import dump_yaml
from compress.schedule.scheduled_run import (
    FINAL_EXIT_CODES,
    MAX_RETRIES,
    RETRIED_EXIT_CODES,
    STOP_SECONDS,
    ScheduledRun,
)
from compress.schedule.target import TARGETS, ScheduleFile

_CONTAINER = "compress"


class Kubernetes:
    """The target `kubernetes`."""

    takes = frozenset({"schedule", "timezone", "workdir", "image", "gpus", "volumes"})
    needs = frozenset({"image"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the CronJob or the Job. Raises UsageError as the protocol states."""
        if run.timezone is not None and run.schedule is None:
            raise UsageError(
                "--timezone is for a schedule; give --schedule, or leave it out.", where="--timezone"
            )
        labels = {"app.kubernetes.io/name": "compress", "app.kubernetes.io/instance": run.name}
        metadata = {"name": run.name, "labels": labels}
        job = _job(run, labels)
        if run.schedule is None:
            document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
        else:
            spec = {
                "schedule": str(run.schedule),
                **({} if run.timezone is None else {"timeZone": run.timezone}),
                "concurrencyPolicy": "Forbid",
                "successfulJobsHistoryLimit": 3,
                "failedJobsHistoryLimit": 3,
                "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
            }
            document = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata, "spec": spec}
        header = f"# {run.name}.yaml: `kubectl apply -f {run.name}.yaml`\n"
        return (ScheduleFile(f"{run.name}.yaml", header + dump_yaml(document)),)


def _job(run: ScheduledRun, labels: dict[str, str]) -> dict[str, Any]:
    def on(action: str, codes: tuple[int, ...]) -> dict[str, Any]:
        matched = {"containerName": _CONTAINER, "operator": "In", "values": list(codes)}
        return {"action": action, "onExitCodes": matched}

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [_container(run)],
    }
    if run.volumes:
        pod["volumes"] = [
            {"name": f"volume-{idx}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for idx, volume in enumerate(run.volumes)
        ]
    return {
        "backoffLimit": MAX_RETRIES,
        "podFailurePolicy": {
            "rules": [on("FailJob", FINAL_EXIT_CODES), disrupted, on("Count", RETRIED_EXIT_CODES)]
        },
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _container(run: ScheduledRun) -> dict[str, Any]:
    program, *arguments = (word.replace("$", "$$") for word in run.words())
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": run.image,
        "command": [program],
        "args": arguments,
    }
    if run.workdir is not None:
        container["workingDir"] = run.directory
    if run.gpus is not None:
        if not re.fullmatch("[1-9][0-9]*", run.gpus):
            raise UsageError(
                f"--gpus {run.gpus}: give kubernetes their number; the nodes decide on the kind.",
                where="--gpus",
            )
        container["resources"] = {"limits": {"nvidia.com/gpu": int(run.gpus)}}
    if run.volumes:
        container["volumeMounts"] = [
            {"name": f"volume-{idx}", "mountPath": volume.path} for idx, volume in enumerate(run.volumes)
        ]
    return container


TARGETS.add("kubernetes", Kubernetes())
