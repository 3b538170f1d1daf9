"""Several recipes and matrices by one command, and runs that share a workspace."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.workspace import Workspace
from compress.cli import run_many
from compress.cli.app import main
from compress.cli.children import Ended, Order
from compress.cli.output import begin
from compress.pipeline import RunDir
from compress.recipe import read_yaml
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]
QUICK_VALIDATE = {**VALIDATE, "latency": None}
MATRIX = {
    "matrix": {"round": ["rtn", "gptq"]},
    "stages": [CALIBRATE, {"kind": "quantize", "round": {"kind": "$(matrix.round)"}}, EXPORT, QUICK_VALIDATE],
    "push": {"to": "layout://registry", "name": "tiny-$(matrix.round)"},
}
ROOT = Path(__file__).parents[2]


def test_of_one_run_directory_two_runs_exclude_each_other_and_those_of_others_do_not(
    recipe: Recipe, command: Command
) -> None:
    path = recipe(stages=[CALIBRATE])
    with Workspace(Path(".compress")).share(), RunDir(Path("runs/recipe")).held():
        code, out, err = command("run", path)
        assert (code, out) == (75, "")
        assert f"runs/recipe is in use by process {os.getpid()} on" in err
        code, _, err = command("run", path, "--run-dir", "runs/other")
        assert code == 0, err
        code, _, err = command("run", path, "--run-dir", "runs/third", "--from", "calibrate")
        assert code == 75
        assert "the workspace .compress is in use by process" in err
    assert command("run", path, "--from", "calibrate")[0] == 0


def test_a_run_that_waits_for_another_ones_result_stops_by_a_signal(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(stages=[CALIBRATE])
    keys: list[str] = []
    building = Workspace.building
    monkeypatch.setattr(
        Workspace, "building", lambda self, key, **wait: keys.append(key) or building(self, key, **wait)
    )
    assert command("run", path)[0] == 0
    workspace = Workspace(Path(".compress"))
    workspace.discard(keys[0])
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", look)
    with building(workspace, keys[0], wait=lambda: pytest.fail("held already")):
        code, _, err = command("run", path)
    assert code == 143
    assert "calibrate is being built by another run; waiting for it" in err
    assert "the same command resumes" in err
    assert len(looks) == 2


def test_plan_shows_every_case_and_python_runs_one(recipe: Recipe, command: Command) -> None:
    import compress

    path = recipe("m.yaml", **MATRIX)
    plain = recipe("plain.yaml")
    code, out, err = command("plan", path, plain, "--offline", "--json")
    assert code == 0, err
    plans = json.loads(out)["plans"]
    assert [each.get("case") for each in plans] == ["rtn", "gptq", None]
    code, out, err = command("plan", path, "--case", "gptq", "--offline", "--json")
    assert json.loads(out) == {"schema": 1, "status": "done", **plans[1], "exit_code": 0}
    code, out, _ = command("plan", path, "--offline")
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["rtn", "gptq"]
    result = compress.run(path, case="gptq", until="calibrate")
    assert result.run_dir.path == Path("runs/m-gptq")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the commands of several runs run one after the other in this process, which has the libraries:
    tests/unit/cli/test_children.py has the processes, and the slow tests below have both.
    """

    def answered(orders: list[Order], **options: Any) -> list[Ended]:
        ended = []
        for order in orders:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                code = main(list(order.command[3:]))
            ended.append(Ended(code, out.getvalue(), 1.0))
        begin(debug=False)
        return ended

    monkeypatch.setattr(run_many, "run_children", answered)


def test_a_matrix_is_run_compared_and_resumed(
    recipe: Recipe, command: Command, in_this_process: None
) -> None:
    path = recipe("m.yaml", **MATRIX)
    broken = recipe("broken.yaml", stages=[{"kind": "quantise"}])
    code, out, err = command("run", path, broken, "--json")
    assert code == 2, err
    document = json.loads(out)
    assert [(each["name"], each["exit_code"]) for each in document["runs"]] == [
        ("m-rtn", 0),
        ("m-gptq", 0),
        ("broken", 2),
    ]
    assert document["runs"][2]["document"]["error"]["where"].startswith(str(broken))
    cached = [stage["cached"] for run in document["runs"][:2] for stage in run["document"]["stages"]]
    assert cached == [False] * 4 + [True] + [False] * 3
    assert [run["document"]["pushed"]["name"] for run in document["runs"][:2]] == ["tiny-rtn", "tiny-gptq"]

    (comparison,) = document["comparisons"]
    assert comparison["cases"] == ["rtn", "gptq"]
    assert comparison["page"] == "runs/m/compare.html"
    text = Path("runs/m/compare.html").read_text()
    assert all(case in text for case in comparison["cases"])
    assert "<script" not in text

    by_hand = json.loads(path.read_text().replace("$(matrix.round)", "gptq"))
    del by_hand["matrix"]
    Path("by_hand.yaml").write_text(json.dumps(by_hand))
    code, out, err = command("run", "by_hand.yaml", "--json")
    assert code == 0, err
    single = json.loads(out)
    assert all(stage["cached"] for stage in single["stages"])
    assert single["artifact"]["digest"] == document["runs"][1]["document"]["artifact"]["digest"]

    code, out, err = command("resume", "runs/m-gptq", "--json")
    assert code == 0, err
    assert json.loads(out)["artifact"] == single["artifact"]
    assert json.loads(Path("runs/m-gptq/evidence/provenance.json").read_text())["recipe"]["case"] == "gptq"


@pytest.mark.slow
def test_a_signal_stops_all_runs_at_a_boundary_and_the_same_command_ends_them(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe("m.yaml", **{**MATRIX, "stages": MATRIX["stages"][:3]})
    words = ["run", str(path), "--jobs", "2", "--device", "cpu", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "compress", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "quantize 0/" in line:
            process.send_signal(signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 143
    stopped = json.loads(out)
    assert stopped["error"]["kind"] == "Interrupted"
    assert 143 in [each["exit_code"] for each in stopped["runs"]]
    code, out, err = command(*words)
    assert code == 0, err
    runs = json.loads(out)["runs"]
    assert [each["status"] for each in runs] == ["done", "done"]
    assert not list(Path(".compress/locks").iterdir())
    single = (
        "run",
        path,
        "--case",
        "gptq",
        "--workspace",
        "single",
        "--run-dir",
        "single",
        "--device",
        "cpu",
    )
    code, out, err = command(*single, "--json")
    assert code == 0, err
    assert json.loads(out)["artifact"]["digest"] == runs[1]["document"]["artifact"]["digest"]


@pytest.mark.slow
def test_the_example_recipe_runs_in_small(command: Command, work: Path) -> None:
    tree: Any = read_yaml((ROOT / "recipes" / "matrix.yaml").read_text(), file="matrix.yaml")[0]
    tree["matrix"]["scheme"] = tree["matrix"]["scheme"][:1]
    tree["stages"][0] |= {"num_samples": 4, "seq_len": 64}
    tree["stages"][3] |= {"num_samples": 2, "seq_len": 64, "gates": {"kl_mean": 2.0}}
    Path("matrix.yaml").write_text(json.dumps(tree))
    code, out, err = command("run", "matrix.yaml", "--jobs", 2, "--device", "cpu")
    assert code == 0, err
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["done"] * 2
    assert "compare  runs/matrix/compare.html" in out
    assert len(list(Path("runs").glob("matrix-*/evidence/report.html"))) == 2
