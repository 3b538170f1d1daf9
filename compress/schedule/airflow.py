"""Airflow 3: a DAG of one BashOperator (package `apache-airflow-providers-standard`).

A run without anything to do ends with 99, which Airflow shows as skipped. Command and directory are templates
of Jinja: text that looks like one is wrapped in `{% raw %}`.
"""

from compress.errors import UsageError
from compress.schedule.scheduled_run import MAX_RETRIES, RETRY_MINUTES, ScheduledRun
from compress.schedule.target import TARGETS, ScheduleFile

_UNCHANGED_EXIT_CODE = 99
_TEXT = """\
# {name}.py: a DAG of Airflow 3; it belongs in the folder of DAGs.
from datetime import timedelta

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    dag_id={name!a},
    schedule={schedule!a},
    start_date=pendulum.datetime(2026, 1, 1, tz={timezone!a}),
    catchup=False,
    max_active_runs=1,
    tags=["compress"],
):
    BashOperator(
        task_id="run",
        bash_command={command!a},
        cwd={directory!a},
        skip_on_exit_code={unchanged},
        retries={retries},
        retry_delay=timedelta(minutes={minutes}),
        append_env=True,
    )
"""


class Airflow:
    """The target `airflow`."""

    takes = frozenset({"schedule", "timezone", "workdir"})
    needs = frozenset({"schedule", "workdir"})

    def render(self, run: ScheduledRun) -> tuple[ScheduleFile, ...]:
        """Return the DAG file. Raises UsageError as the protocol states."""
        command = f"exec {run.command('--unchanged-exit-code', str(_UNCHANGED_EXIT_CODE))}"
        text = _TEXT.format(
            name=run.name,
            schedule=str(run.schedule),
            timezone=run.timezone or "UTC",
            command=_no_template(command),
            directory=_no_template(run.directory),
            unchanged=_UNCHANGED_EXIT_CODE,
            retries=MAX_RETRIES,
            minutes=RETRY_MINUTES,
        )
        return (ScheduleFile(f"{run.name}.py", text),)


def _no_template(text: str) -> str:
    """Return a template that Jinja renders as the text."""
    if not any(mark in text for mark in ("{{", "{%", "{#")):
        return text
    if "endraw" in text:
        raise UsageError(f"'{text}' cannot be kept from Jinja, because it holds the word endraw.")
    return "{% raw %}" + text + "{% endraw %}"


TARGETS.add("airflow", Airflow())
