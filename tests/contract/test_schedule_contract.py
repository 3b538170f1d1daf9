"""What every schedule target promises, over all registered ones."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compress.errors import UsageError
from compress.schedule.cron_expression import parse_cron
from compress.schedule.scheduled_run import ScheduledRun, Volume
from compress.schedule.target import OPTIONS, TARGETS, render
from tests.support.schedule_readers import READERS, write_program

ROOT = Path(__file__).parents[2]
GIVEN: dict[str, Any] = {
    "schedule": parse_cron("0 3 * * *"),
    "timezone": "UTC",
    "workdir": "/srv/models",
    "image": "registry.example/compress:1",
    "gpus": "1",
    "volumes": (Volume("models", "/srv/models"),),
    "runners": ("self-hosted",),
}
FOR_TARGET: dict[str, dict[str, Any]] = {"skypilot": {"gpus": "H100:1"}}
HOSTILE = [
    "my recipes/it's 50% off.yaml",
    'a "quoted" $HOME $(id) `id` ${{ x }} {{ y }} {% z %} {# c.yaml',
    "nöt ascii: *?[a]~&;|<>#!.yaml",
    "no",
    "$$",
    "%%",
    "'",
]
OWN = {path.stem for path in (ROOT / "compress" / "schedule").glob("*.py")}
each_target = pytest.mark.parametrize("target", TARGETS.names())


def run_for(target: str, *, only_needed: bool = False, **more: Any) -> ScheduledRun:
    """Return a run with every option that a target takes, or with those that it needs."""
    found = TARGETS.get(target)
    names = found.needs if only_needed else found.takes
    options = {
        name: value for name, value in {**GIVEN, **FOR_TARGET.get(target, {})}.items() if name in names
    }
    plain = {"recipe": "recipes/w4.yaml", "name": "w4", "executable": "/srv/models/.venv/bin/compress"}
    return ScheduledRun(**{**plain, **options, **more})


@each_target
def test_the_same_run_gives_the_same_text(target: str) -> None:
    files = render(target, run_for(target))
    assert files == render(target, run_for(target))
    assert len({each.name for each in files}) == len(files)
    for each in files:
        assert each.text.startswith("# ")
        assert each.name in each.text.splitlines()[0]
        assert each.text.endswith("\n")
        assert not each.text.endswith("\n\n")
    assert str(ROOT) not in "".join(each.text for each in files)


@each_target
def test_what_a_target_needs_is_enough(target: str) -> None:
    assert render(target, run_for(target, only_needed=True))


@each_target
def test_an_option_is_never_dropped(target: str) -> None:
    found = TARGETS.get(target)
    assert found.needs <= found.takes <= OPTIONS.keys()
    whole = render(target, run_for(target))
    for name in found.takes - found.needs - {"timezone"}:
        less = dataclasses.replace(
            run_for(target), **{name: type(GIVEN[name])() if name in ("volumes", "runners") else None}
        )
        if name == "schedule":
            less = dataclasses.replace(less, timezone=None)
        assert render(target, less) != whole, name
    for name in OPTIONS.keys() - found.takes:
        with pytest.raises(UsageError, match=f"no place for {OPTIONS[name]}"):
            render(target, dataclasses.replace(run_for(target), **{name: GIVEN[name]}))
    for name in found.needs:
        with pytest.raises(UsageError, match=f"needs {OPTIONS[name]}"):
            render(target, dataclasses.replace(run_for(target), **{name: None}))


@each_target
@pytest.mark.parametrize("text", HOSTILE)
def test_every_value_reaches_the_run_as_it_was_given(target: str, text: str, tmp_path: Path) -> None:
    if target not in OWN:
        pytest.skip("the reader of a target from elsewhere is not here")
    program = tmp_path / "bin of 50%" / "compress"
    record = tmp_path / "record.json"
    write_program(program, record)
    directory = tmp_path / "it's 50% of models"
    directory.mkdir()
    workdir = {"workdir": str(directory)} if "workdir" in TARGETS.get(target).takes else {}
    run = run_for(target, recipe=text, executable=str(program), options=("--metrics-file", text), **workdir)
    started = READERS[target](render(target, run), record, tmp_path)
    expected = [str(program), "run", text, "--if-changed", "--metrics-file", text]
    assert started.words[: len(expected)] == expected
    assert set(started.words[len(expected) :]) <= {"--json", "--unchanged-exit-code", "99"}
    if workdir:
        assert started.directory == str(directory)


@each_target
@pytest.mark.parametrize("text", ["", "a\nb", "a\x1bb", "a\0b", "-x.yaml", " a", "a\u202eb"])
def test_what_no_scheduler_can_be_given_is_refused(target: str, text: str) -> None:
    with pytest.raises(UsageError):
        render(target, run_for(target, recipe=text))


@each_target
def test_every_target_is_documented(target: str) -> None:
    if target not in OWN:
        pytest.skip("a target from elsewhere has a page of its own")
    page = (ROOT / "docs" / "schedule.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{target}` \|.*", page, flags=re.MULTILINE)
    for name in TARGETS.get(target).takes:
        assert f"`{OPTIONS[name]}`" in row, OPTIONS[name]


def test_the_help_of_the_command_names_every_target() -> None:
    text = (ROOT / "compress" / "cli" / "schedule.py").read_text(encoding="utf-8")
    assert all(re.search(rf"Scheduler: .*\b{target}\b", text) for target in TARGETS.names() if target in OWN)


# -------------------------------------------------------------------------------------------------------
# checkers of the system; those of other packages are in tests/interop/test_schedulers.py


@pytest.mark.skipif(shutil.which("crontab") is None, reason="needs cron")
@pytest.mark.parametrize("text", HOSTILE)
def test_cron_accepts_the_line(text: str, tmp_path: Path) -> None:
    (file,) = render("cron", run_for("cron", recipe=text))
    (tmp_path / file.name).write_text(file.text)
    checked = subprocess.run(["crontab", "-n", tmp_path / file.name], capture_output=True, text=True)
    if "unrecognized option" in checked.stderr:
        pytest.skip("this crontab checks no file")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("text", HOSTILE)
def test_systemd_accepts_the_units(text: str, tmp_path: Path) -> None:
    program = tmp_path / "bin of 50%" / "compress"
    write_program(program, tmp_path / "record")
    workdir = tmp_path / "it's 50% of models"
    workdir.mkdir()
    run = run_for("systemd", recipe=text, executable=str(program), workdir=str(workdir))
    units = tmp_path / "units"
    units.mkdir()
    for file in render("systemd", run):
        (units / file.name).write_text(file.text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(units.iterdir())], capture_output=True, text=True
    )
    about_ours = [line for line in checked.stderr.splitlines() if "w4" in line]
    assert (checked.returncode, about_ours) == (0, [])
