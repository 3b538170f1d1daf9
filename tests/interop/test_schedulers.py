"""Rendered schedules before the schedulers' own checkers: Airflow imports and runs the DAG, SkyPilot reads
the task, and Kubernetes' and GitHub's schemas hold the rest. `make schedulers` builds their environments;
cron and systemd are in the contract test.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compress.schedule.target import TARGETS, ScheduleFile, render
from tests.contract.test_schedule_contract import HOSTILE, run_for
from tests.support.schedule_readers import write_program

ENVIRONMENT = ".venv-schedulers"
SKYPILOT = ".venv-skypilot"
ROOT = Path(__file__).parents[2]
BIN = ROOT / ENVIRONMENT / "bin"
OLDEST_KUBERNETES = "1.31"  # the first in which podFailurePolicy is stable
CHECKED = {"airflow", "github", "kubernetes", "skypilot"} | {"cron", "systemd"}
AIRFLOW = """
import json, os, sys
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowSkipException
bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
(dag,) = bag.dags.values()
task = dag.get_task("run")
task.render_template_fields({})
try:
    task.execute({})
    ended = "done"
except AirflowSkipException:
    ended = "skipped"
except Exception as error:
    ended = type(error).__name__
facts = {"dag": dag.dag_id, "schedule": dag.schedule, "zone": str(dag.timezone), "retries": task.retries}
print(json.dumps({**facts, "active": dag.max_active_runs, "ended": ended}))
"""
SKY = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({"name": task.name, "run": task.run, "accelerators": resources.accelerators,
                  "recovery": resources.job_recovery}))
"""

each_text = pytest.mark.parametrize("text", HOSTILE)


def written(target: str, folder: Path, **more: Any) -> list[Path]:
    files: tuple[ScheduleFile, ...] = render(target, run_for(target, **more))
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.name).write_text(file.text)
    return [folder / file.name for file in files]


def ran(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_no_target_is_without_a_checker() -> None:
    assert set(TARGETS.names()) == CHECKED


@pytest.mark.interop(ENVIRONMENT)
@each_text
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, None])
def test_kubernetes_schema_accepts_the_job_and_the_cron_job(
    text: str, version: str | None, tmp_path: Path
) -> None:
    paths = written("kubernetes", tmp_path / "cron-job", recipe=text)
    paths += written("kubernetes", tmp_path / "job", recipe=text, schedule=None, timezone=None)
    chosen = [] if version is None else ["--kubernetes-version", version]
    ran(BIN / "kubernetes-validate", "--strict", *chosen, *paths)


@pytest.mark.interop(ENVIRONMENT)
@each_text
def test_the_schema_of_workflows_accepts_the_workflow(text: str, tmp_path: Path) -> None:
    paths = written("github", tmp_path, recipe=text)
    ran(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *paths)


@pytest.mark.interop(ENVIRONMENT)
@pytest.mark.parametrize(("exit_code", "ended"), [(0, "done"), (99, "skipped"), (3, "AirflowException")])
@pytest.mark.parametrize("text", HOSTILE[:2])
def test_airflow_imports_the_dag_and_runs_its_task(
    text: str, exit_code: int, ended: str, tmp_path: Path
) -> None:
    program = tmp_path / "bin of 50%" / "compress"
    record = tmp_path / "record.json"
    write_program(program, record, code=exit_code)
    workdir = tmp_path / "it's {{ 50% }} of models"
    workdir.mkdir()
    dags = tmp_path / "dags"
    options = {
        "recipe": text,
        "executable": str(program),
        "workdir": str(workdir),
        "timezone": "Europe/Berlin",
    }
    written("airflow", dags, **options)
    (tmp_path / "airflow.py").write_text(AIRFLOW)
    home = {"AIRFLOW_HOME": str(tmp_path / "home"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = ran(BIN / "python", "-P", tmp_path / "airflow.py", dags, **home)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["ended"] == ended
    assert (facts["dag"], facts["schedule"], facts["zone"]) == ("w4", "0 3 * * *", "Europe/Berlin")
    assert (facts["active"], facts["retries"]) == (1, 3)
    directory, words = json.loads(record.read_text())
    assert directory == str(workdir)
    assert words == [str(program), "run", text, "--if-changed", "--unchanged-exit-code", "99"]


@pytest.mark.interop(SKYPILOT)
@each_text
def test_skypilot_reads_the_task(text: str, tmp_path: Path) -> None:
    (path,) = written("skypilot", tmp_path, recipe=text, workdir=None)
    (tmp_path / "read_task.py").write_text(SKY)
    python = ROOT / SKYPILOT / "bin" / "python"
    done = ran(
        python,
        "-P",
        tmp_path / "read_task.py",
        path,
        HOME=str(tmp_path),
        SKYPILOT_DISABLE_USAGE_COLLECTION="1",
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["name"] == "w4"
    assert facts["run"] == run_for("skypilot", recipe=text).command()
    assert facts["accelerators"] == {"H100": 1}
    assert facts["recovery"]["recover_on_exit_codes"] == [5, 75, 143]
