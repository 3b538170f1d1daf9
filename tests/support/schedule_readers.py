"""Readers of what `compress schedule render` writes, by the rules of each scheduler: the command that it
would run, and where. A shell, Jinja and YAML are the real ones; the rules of systemd, cron and Kubernetes are
written down here from their manuals.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
from ruamel.yaml import YAML

from compress.schedule.target import ScheduleFile

Files = tuple[ScheduleFile, ...]
PROGRAM = """\
#!{python}
import json, os, sys
open({record!r}, "w").write(json.dumps([os.getcwd(), sys.argv]))
sys.exit({code})
"""


@dataclass(frozen=True)
class Started:
    """The directory in which a program was started, and its words; None where the text does not tell."""

    directory: str | None
    words: list[str]


def write_program(path: Path, record: Path, *, code: int = 0) -> None:
    """Write a program that records how it was started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM.format(python=sys.executable, record=str(record), code=code))
    path.chmod(0o755)


def shell(command: str, record: Path, *, cwd: Path, program: str = "/bin/sh") -> Started:
    """Return what the program of `write_program` recorded when a shell ran the command."""
    subprocess.run([program, "-c", command], cwd=cwd, check=False, capture_output=True)
    directory, words = json.loads(record.read_text())
    record.unlink()
    return Started(directory, words)


def yaml_of(text: str) -> Any:
    """Return a YAML document, which must be one value to readers of YAML 1.1 and of 1.2."""
    found = YAML(typ="safe", pure=True).load(text)
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)
    assert old.load(text) == {True if key == "on" else key: value for key, value in found.items()}
    return found


def of_cron(files: Files, record: Path, cwd: Path) -> Started:
    """Read a crontab as Vixie's cron does: `\\%` is a percent sign, and `%` ends the command."""
    (line,) = [each for each in files[0].text.splitlines() if not each.startswith("#")]
    command = re.sub(r"(?<!\\)%.*", "", line.split(None, 5)[5]).replace("\\%", "%")
    return shell(command, record, cwd=cwd)


def of_systemd(files: Files, record: Path, cwd: Path) -> Started:
    """Read a unit by systemd.syntax(7), systemd.unit(5) (specifiers) and systemd.service(5) (variables)."""
    settings = dict(
        line.split("=", 1) for line in files[0].text.splitlines() if "=" in line and not line.startswith("#")
    )
    words = [
        re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
        for quoted, plain in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', settings["ExecStart"])
    ]
    for word in words:
        assert "%" not in word.replace("%%", ""), "a specifier"
    words = [word.replace("%%", "%") for word in words]
    for word in words[1:]:
        assert "$" not in word.replace("$$", ""), "a variable"
    return Started(
        settings["WorkingDirectory"].replace("%%", "%"),
        [words[0], *(word.replace("$$", "$") for word in words[1:])],
    )


def of_kubernetes(files: Files, record: Path, cwd: Path) -> Started:
    """Read a Job: `$(NAME)` is a variable, and `$$` is `$` (k8s.io, "Define a command")."""
    document = yaml_of(files[0].text)
    job = document["spec"]["jobTemplate"]["spec"] if document["kind"] == "CronJob" else document["spec"]
    (container,) = job["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    for word in words:
        assert "$(" not in word.replace("$$", "")
    return Started(container.get("workingDir"), [word.replace("$$", "$") for word in words])


def of_airflow(files: Files, record: Path, cwd: Path) -> Started:
    """Read a DAG file with stand-ins for Airflow's classes; Jinja renders the two templates."""
    (task,) = airflow_tasks(files[0].text)
    rendered = {key: jinja2.Template(task[key]).render() for key in ("bash_command", "cwd")}
    started = shell(rendered["bash_command"], record, cwd=cwd, program="bash")
    return Started(rendered["cwd"], started.words)


def airflow_tasks(text: str) -> list[dict[str, Any]]:
    """Return the arguments of the tasks of a DAG file, those of its DAG among them under `dag`."""
    tasks: list[dict[str, Any]] = []
    opened: list[dict[str, Any]] = []

    class Dag:
        def __init__(self, **settings: Any) -> None:
            self.settings = settings

        def __enter__(self) -> None:
            opened.append(self.settings)

        def __exit__(self, *error: object) -> None:
            opened.pop()

    stand_ins = {
        "airflow": {},
        "airflow.sdk": {"DAG": Dag},
        "airflow.providers": {},
        "airflow.providers.standard": {},
        "airflow.providers.standard.operators": {},
        "airflow.providers.standard.operators.bash": {
            "BashOperator": lambda **settings: tasks.append({**settings, "dag": opened[-1]})
        },
        "pendulum": {"datetime": lambda *date, tz: (date, tz)},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in stand_ins.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        exec(compile(text, "dag.py", "exec"), {"__name__": "dag"})
    return tasks


def of_github(files: Files, record: Path, cwd: Path) -> Started:
    """Read a workflow: an expression that is one text in quotes is that text."""
    document = yaml_of(files[0].text)
    (command,) = [step["run"] for step in document["jobs"]["compress"]["steps"] if "run" in step]
    plain = re.sub(r"\$\{\{ '([^']*)' \}\}", r"\1", command)
    return Started(None, shell(plain, record, cwd=cwd, program="bash").words)


def of_skypilot(files: Files, record: Path, cwd: Path) -> Started:
    """Read a task, whose `run` is a script for bash."""
    document = yaml_of(files[0].text)
    return Started(document["workdir"], shell(document["run"], record, cwd=cwd, program="bash").words)


READERS: Mapping[str, Callable[[Files, Path, Path], Started]] = {
    "airflow": of_airflow,
    "cron": of_cron,
    "github": of_github,
    "kubernetes": of_kubernetes,
    "skypilot": of_skypilot,
    "systemd": of_systemd,
}
"""A reader for each schedule target."""
