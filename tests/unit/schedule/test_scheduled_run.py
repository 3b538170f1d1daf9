"""What `compress schedule render` refuses, and the facts of single schedulers."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.cli.app import asks_for_json, build_app, main
from compress.errors import UsageError
from compress.schedule.cron_expression import parse_cron
from compress.schedule.scheduled_run import FINAL_EXIT_CODES, ScheduledRun, Volume, name_of
from compress.schedule.target import render
from tests.support.schedule_readers import airflow_tasks, yaml_of

Call = Callable[..., tuple[int, str, str]]
DAILY = parse_cron("@daily")
IN_IMAGE: dict[str, Any] = {"recipe": "r.yaml", "name": "r", "image": "registry.example/compress:1"}
ON_HOST: dict[str, Any] = {
    "recipe": "r.yaml",
    "name": "r",
    "executable": "/opt/compress",
    "workdir": "/srv",
    "schedule": DAILY,
}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("recipes/Llama 3.1_8B.yaml", "llama-3-1-8b"), ("x.yml", "x"), ("a" * 80 + ".yaml", "a" * 52)],
)
def test_a_schedule_is_named_after_its_recipe(recipe: str, name: str) -> None:
    assert name_of(recipe) == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Nightly"},
        {"name": "-a"},
        {"name": ""},
        {"name": "a" * 53},
        {"timezone": "Europe/Berlim"},
        {"timezone": "x; rm"},
    ],
)
def test_a_name_and_a_time_zone_are_checked(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        ScheduledRun(**{**ON_HOST, **wrong})


@pytest.mark.parametrize(
    ("target", "changes", "sentence"),
    [
        ("cron", {"executable": "compress"}, "does not search your PATH"),
        ("systemd", {"executable": "compress"}, "does not search your PATH"),
        ("cron", {"workdir": "models"}, "absolute"),
        ("airflow", {"workdir": "models"}, "absolute"),
        ("cron", {"recipe": "a\\b.yaml"}, "backslash"),
        ("cron", {"recipe": "%" * 400 + "/r.yaml"}, "998"),
        ("systemd", {"workdir": "/a\\"}, "backslash"),
        ("systemd", {"executable": "/a$b"}, "takes no program"),
        ("systemd", {"executable": '/a"b'}, "takes no program"),
        ("airflow", {"recipe": "{{ endraw }}"}, "endraw"),
    ],
)
def test_what_a_scheduler_cannot_be_given_is_one_sentence(
    target: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        render(target, ScheduledRun(**{**ON_HOST, **changes}))


@pytest.mark.parametrize(
    ("target", "changes", "sentence"),
    [
        ("kubernetes", {"gpus": "H100:1"}, "their number"),
        ("kubernetes", {"gpus": "0"}, "their number"),
        ("kubernetes", {"timezone": "UTC"}, "for a schedule"),
        ("skypilot", {"gpus": "1"}, "the kind and the number"),
        ("github", {"schedule": parse_cron("*/2 * * * *")}, "every 5 minutes"),
        ("github", {"schedule": DAILY, "timezone": "Europe/Berlin"}, "UTC"),
    ],
)
def test_what_a_container_cannot_be_given_is_one_sentence(
    target: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        render(target, ScheduledRun(**{**IN_IMAGE, **changes}))


def test_kubernetes_decides_by_the_exit_code_of_the_run() -> None:
    (file,) = render("kubernetes", ScheduledRun(**IN_IMAGE, gpus="2", volumes=(Volume("models", "/srv"),)))
    document = yaml_of(file.text)
    assert document["kind"] == "Job"
    job = document["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a failure policy needs it
    actions: dict[int, str] = {}
    for rule in job["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {}).get("values", ()):
            actions.setdefault(code, rule["action"])
    assert actions == dict.fromkeys(FINAL_EXIT_CODES, "FailJob") | dict.fromkeys((5, 75, 143), "Count")
    assert job["backoffLimit"] > 0
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/srv"}
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}


def test_a_schedule_of_kubernetes_starts_one_run_at_a_time_in_its_time_zone() -> None:
    (file,) = render("kubernetes", ScheduledRun(**IN_IMAGE, schedule=DAILY, timezone="Europe/Berlin"))
    document = yaml_of(file.text)
    assert document["kind"] == "CronJob"
    spec = document["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 0 * * *", "Europe/Berlin")
    assert spec["concurrencyPolicy"] == "Forbid"


def test_airflow_skips_a_run_with_nothing_to_do() -> None:
    (file,) = render("airflow", ScheduledRun(**ON_HOST, timezone="Europe/Berlin"))
    (task,) = airflow_tasks(file.text)
    assert task["bash_command"].endswith(f"--unchanged-exit-code {task['skip_on_exit_code']}")
    dag = task["dag"]
    assert (dag["schedule"], dag["start_date"][1]) == ("0 0 * * *", "Europe/Berlin")
    assert dag["catchup"] is False
    assert dag["max_active_runs"] == 1


def test_skypilot_recovers_on_the_exit_codes_that_another_try_mends() -> None:
    (file,) = render("skypilot", ScheduledRun(**IN_IMAGE, gpus="H100:2"))
    resources = yaml_of(file.text)["resources"]
    assert resources["accelerators"] == "H100:2"
    assert set(resources["job_recovery"]["recover_on_exit_codes"]) == {5, 75, 143}


def test_a_label_or_an_image_is_no_expression_of_github() -> None:
    (file,) = render(
        "github", ScheduledRun(**{**IN_IMAGE, "image": "x${{ secrets.A }}"}, runners=("${{ b }}",))
    )
    job = yaml_of(file.text)["jobs"]["compress"]
    assert job["container"]["image"] == "x${{ '${{' }} secrets.A }}"
    assert job["runs-on"] == ["${{ '${{' }} b }}"]


# -------------------------------------------------------------------------------------------------------
# the command


def test_the_page_shows_the_line_that_its_command_prints(call: Call) -> None:
    page = (Path(__file__).parents[3] / "docs" / "schedule.md").read_text(encoding="utf-8")
    shown = page.partition("```cron\n")[2].partition("```")[0]
    command = page.partition("```cron\n")[0].rpartition("```sh\n")[2].partition("```")[0]
    code, out, _ = call(*shlex.split(command)[1:])
    assert code == 0
    assert out.partition("\n")[2] == shown


def test_the_page_shows_what_was_recorded_of_cron() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "schedule.md").read_text(encoding="utf-8")
    rows = json.loads((root / "benchmarks" / "schedule.json").read_text())["rows"]
    assert [row["exit_codes"] for row in rows] == [[0], [0], [3], [0, 75]]
    assert [row["wrong"] for row in rows] == [[]] * 4
    shown = [line for row in rows for line in [*row["cron_log"], *row["log"]] if line in page]
    assert any("status 3" in line for line in shown)
    assert any("status 75" in line for line in shown)
    assert any("a gate failed" in line for line in shown)


def test_the_text_goes_to_stdout_and_files_where_they_are_wanted(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "systemd",
        "r.yaml",
        "--schedule",
        "@daily",
        "--workdir",
        "/nowhere",
        "--executable",
        "/x/compress",
    ]
    code, out, err = call("schedule", "render", *arguments)
    assert code == 0
    assert "not checked" in err
    assert not list(tmp_path.iterdir())
    code, nothing, _ = call("schedule", "render", *arguments, "--output", "units")
    assert (code, nothing) == (0, "")
    written = [path.read_text() for path in sorted((tmp_path / "units").iterdir())]
    assert [path.name for path in sorted((tmp_path / "units").iterdir())] == ["r.service", "r.timer"]
    assert out == "\n".join(written)


def test_a_recipe_that_is_here_is_checked(call: Call, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("version: 2\n")
    options = ["--schedule", "@daily", "--workdir", tmp_path, "--executable", "/x/compress"]
    code, out, err = call("schedule", "render", "cron", "r.yaml", *options)
    assert (code, out) == (2, "")
    assert "r.yaml:1:1: version: 2 is not 1" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["corn", "r.yaml"], "Did you mean 'cron'?"),
        (["cron", "r.yaml"], "needs --schedule, --workdir"),
        (["cron", "r.yaml", "--schedule", "@daily", "--workdir", "/", "--gpus", "1"], "no place for --gpus"),
        (["kubernetes", "r.yaml", "--image", "x", "--volume", "models"], "--volume models"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_code_2(call: Call, words: list[str], sentence: str) -> None:
    code, out, err = call("schedule", "render", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_usage_error_of_two_words_is_a_document_too(call: Call) -> None:
    code, out, _ = call("schedule", "render", "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "UsageError"
    import typer

    command: Any = typer.main.get_command(build_app())
    assert asks_for_json(["schedule", "render", "--name", "x", "--json"], command)
    assert not asks_for_json(["schedule", "render", "--name", "--json"], command)
