"""What an unattended run leaves for those who were not there: metrics and webhooks, for every outcome."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from prometheus_client.parser import text_string_to_metric_families

from compress.artifact.workspace import Workspace
from tests.support.hook_server import HookServer, hook_server
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]


def metrics(path: Path) -> dict[str, float]:
    return {
        " ".join([each.name, *(value for name, value in each.labels.items() if name != "recipe")]): each.value
        for family in text_string_to_metric_families(path.read_text())
        for each in family.samples
    }


def sent(server: HookServer) -> dict[str, Any]:
    """Return the document of the only request since the last call."""
    ((_, headers, body),) = server.requests
    server.requests.clear()
    assert headers["x-compress-recipe"] == "recipe"
    return dict(json.loads(body))


def with_gate(limit: float) -> list[dict[str, Any]]:
    *before, validate = RECIPE["stages"]
    return [*before, {**validate, "gates": {"ppl_ratio": limit}}]


def test_every_outcome_of_a_run_is_measured_and_sent(recipe: Recipe, command: Command, work: Path) -> None:
    file = work / "nightly.prom"
    with hook_server() as server:
        notify = {"webhook": server.url, "on": ["done", "unchanged", "stopped", "gate_failed", "error"]}

        def run(*options: str, **changes: Any) -> tuple[dict[str, Any], dict[str, float]]:
            path = recipe(notify=notify, **changes)
            code, out, err = command("run", path, "--metrics-file", file, "--json", *options)
            document = json.loads(out)
            assert document["exit_code"] == code
            assert sent(server) == document, err
            found = metrics(file)
            assert found["compress_run_exit_code"] == code
            assert found[f"compress_run_status {document['status']}"] == 1
            return document, found

        done, first = run()
        assert done["status"] == "done"
        assert first["compress_gate_value ppl_ratio"] == done["gates"][0]["value"]
        unchanged, second = run("--if-changed", "--unchanged-exit-code", "99")
        assert (unchanged["status"], unchanged["exit_code"]) == ("unchanged", 99)
        success = "compress_run_last_success_timestamp_seconds"
        assert second[success] > first[success]

        failed, third = run(stages=with_gate(0.5))
        assert (failed["status"], failed["exit_code"]) == ("gate_failed", 3)
        assert third["compress_gate_passed ppl_ratio"] == 0
        wrong, _ = run(stages=[{"kind": "quantise"}])
        assert (wrong["error"]["kind"], wrong["exit_code"]) == ("RecipeError", 2)
        with Workspace(work / ".compress").lock():
            held, last = run(seed=5)
        assert (held["error"]["kind"], held["exit_code"]) == ("LockHeld", 75)
        assert last[success] == second[success]
        assert last["compress_run_last_timestamp_seconds"] > third["compress_run_last_timestamp_seconds"]


def test_resume_reports_as_run_does_and_the_document_is_sent_without_json(
    recipe: Recipe, command: Command, work: Path
) -> None:
    with hook_server() as server:
        path = recipe(notify=[{"webhook": server.url}], stages=RECIPE["stages"][:3])
        code, out, _ = command("run", path)
        assert code == 0
        assert out.startswith("status")
        assert sent(server)["status"] == "done"
        code, _, _ = command("resume", work / "runs" / "recipe", "--metrics-file", "m.prom")
        assert code == 0
        assert metrics(work / "m.prom")["compress_run_status done"] == 1
        assert sent(server)["status"] == "done"


def test_hook_and_metrics_that_fail_change_neither_document_nor_exit_code(
    recipe: Recipe, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hook_server(lambda number: (500, {})) as server:
        path = recipe(stages=[{"kind": "quantise"}], notify={"webhook": server.url, "timeout_s": 0.1})
        alone = json.loads(command("run", path, "--json")[1])
        monkeypatch.setattr("compress.outcome.metrics_file._LOCK_S", 0.05)
        with FileLock(work / ".m.prom.lock"):
            code, out, err = command("run", path, "--json", "--metrics-file", "m.prom")
    assert code == 2
    assert json.loads(out) == alone
    warnings = [line for line in err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 2
    assert "metrics" in warnings[0]
    assert "it answered 500" in warnings[1]


def test_a_metrics_file_that_nobody_reads_is_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path
) -> None:
    code, _, err = command("run", recipe(), "--metrics-file", "m.txt")
    assert code == 2
    assert ".prom" in err
    assert not (work / ".compress").exists()
