"""A recipe whose validation serves requests under load: plan, report, model card and gates."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
LOAD = {
    "max_concurrency": 2,
    "num_requests": 4,
    "prompt_tokens": 6,
    "output_tokens": 3,
    "repeats": 2,
    "warmups": 1,
    "goodput": {"ttft": 1e6},
}


def stages(load: dict[str, Any] | None, gates: dict[str, Any]) -> list[dict[str, Any]]:
    changed = copy.deepcopy(RECIPE["stages"])
    changed[-1] |= {"load": load, "gates": gates, "latency": None}
    return changed


def test_both_models_are_measured_under_load_and_the_evidence_shows_it(
    recipe: Callable[..., Path], command: Command, work: Path
) -> None:
    gates = {"goodput": {"cuda-sm90": 1.0}, "load.itl_ms_p99": {"cuda-sm90": 9.0}}
    path = recipe(stages=stages(LOAD, gates))
    code, out, _ = command("plan", path, "--json")
    assert code == 0
    assert "load: 4 runs of 4 requests" in out
    code, out, err = command("run", path, "--json")
    assert code == 0, err
    evidence = work / "runs" / path.stem / "evidence"
    report = json.loads((evidence / "report.json").read_text())
    source, candidate = report["load"]["rows"]
    assert (source["target"], candidate["target"]) == ("source", "candidate")
    for row in (source, candidate):
        assert (row["completed"], row["total_output_tokens"], row["max_concurrent_requests"]) == (4, 12, 2)
        assert row["goodput_frac"] == 1.0
    assert source["input_tokens_digest"] == candidate["input_tokens_digest"]
    assert report["load"]["series"]
    assert {each["name"] for each in report["gates"]} == set(gates)
    assert "<h2>Under load</h2>" in (evidence / "report.html").read_text()
    assert "## Under load" in (evidence / "README.md").read_text()


def test_a_gate_on_a_load_that_nobody_asked_for_is_refused_before_anything_runs(
    recipe: Callable[..., Path], command: Command
) -> None:
    path = recipe(stages=stages(None, {"goodput": {"cpu": 1.0}}))
    code, _, err = command("run", path)
    assert code == 2
    assert "needs requests under load" in err


def test_an_objective_that_does_not_exist_is_refused_where_it_is_written(
    recipe: Callable[..., Path], command: Command
) -> None:
    path = recipe(stages=stages(LOAD | {"goodput": {"tfft": 5.0}}, {}))
    code, _, err = command("plan", path)
    assert code == 2
    assert "Did you mean 'ttft'" in err
