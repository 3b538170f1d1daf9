"""The metrics file, read by Prometheus' own parser; and `promtool` where it is installed."""

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from prometheus_client.parser import text_string_to_metric_families

from compress.errors import StorageError, UsageError
from compress.outcome import metrics_file
from compress.outcome.metrics_file import (
    STATUSES,
    check_metrics_file,
    last_success,
    metrics_text,
    write_metrics,
)

RECIPE = 'a "quoted" \\ recipe\nof 50%'
NOW_S = 1_800_000_000.25
GATES = [
    {
        "name": "ppl_ratio",
        "relation": "<=",
        "limit": 1.06,
        "value": 1.02,
        "bound": 1.03,
        "passed": True,
        "note": "",
    },
    {
        "name": "top1",
        "relation": ">=",
        "limit": 0.9,
        "value": 0.85,
        "bound": 0.84,
        "passed": False,
        "note": "",
    },
    {
        "name": "ttft",
        "relation": "<=",
        "limit": 2,
        "value": None,
        "bound": None,
        "passed": None,
        "note": "no GPU",
    },
]
DONE: dict[str, Any] = {"schema": 1, "status": "done", "gates": GATES, "exit_code": 0}
FAILED: dict[str, Any] = {"schema": 1, "status": "gate_failed", "gates": GATES, "exit_code": 3}
ERROR: dict[str, Any] = {"schema": 1, "status": "error", "exit_code": 75, "error": {}}
SUCCESS = "compress_run_last_success_timestamp_seconds"


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples by name and labels without the recipe's, which each sample must have."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["recipe"] == RECIPE
            others = [value for name, value in sorted(sample.labels.items()) if name != "recipe"]
            found[sample.name, *others] = sample.value
    return found


def write(path: Path, document: dict[str, Any], now_s: float) -> dict[tuple[str, ...], float]:
    write_metrics(path, document, recipe=RECIPE, seconds=12.5, now_s=now_s)
    return samples(path.read_text())


def test_the_metrics_state_what_the_document_does(tmp_path: Path) -> None:
    found = write(tmp_path / "a.prom", FAILED, NOW_S)
    assert found["compress_run_last_timestamp_seconds",] == NOW_S
    assert found["compress_run_duration_seconds",] == 12.5
    assert found["compress_run_exit_code",] == 3
    assert {each: found["compress_run_status", each] for each in STATUSES} == {
        each: float(each == "gate_failed") for each in STATUSES
    }
    for gate in GATES:
        assert found["compress_gate_limit", gate["name"], gate["relation"]] == gate["limit"]
        for key in ("value", "bound", "passed"):
            assert found.get((f"compress_gate_{key}", gate["name"])) == gate[key]


def test_the_time_of_the_last_success_outlives_runs_that_fail(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    assert write(path, ERROR, NOW_S)[SUCCESS,] == 0
    assert write(path, DONE, NOW_S + 1)[SUCCESS,] == NOW_S + 1
    assert write(path, FAILED, NOW_S + 2)[SUCCESS,] == NOW_S + 1
    assert write(path, ERROR, NOW_S + 3)[SUCCESS,] == NOW_S + 1
    assert write(path, {**DONE, "status": "stopped"}, NOW_S + 4)[SUCCESS,] == NOW_S + 1
    found = write(path, {**DONE, "status": "unchanged"}, NOW_S + 5)
    assert found[SUCCESS,] == NOW_S + 5
    assert found["compress_run_status", "unchanged"] == 1


@pytest.mark.parametrize(
    "before",
    [
        "",
        "\0" * 100,
        "x" * 3_000_000,
        f'{SUCCESS}{{recipe="other"}} 5\n',
        "{line}nan",
        "{line}inf",
        "{line}-5",
        "{line}1e400",
        "{line}9000000000",
        "{line}",
        "{line}5.5.5",
        "{line}0x10",
    ],
)
def test_a_file_that_cannot_be_believed_counts_as_none(before: str, tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    line = next(
        row
        for row in metrics_text(DONE, recipe=RECIPE, seconds=1, now_s=5, before_s=0).splitlines()
        if row.startswith(SUCCESS)
    )
    assert last_success_of(path, line.removesuffix("5") + "5") == 5
    assert last_success_of(path, before.replace("{line}", line.removesuffix("5"))) == 0
    assert write(path, ERROR, NOW_S)[SUCCESS,] == 0


def last_success_of(path: Path, text: str) -> float:
    path.write_text(text)
    return last_success(path, RECIPE, now_s=NOW_S)


def test_a_directory_in_place_of_the_file_counts_as_none(tmp_path: Path) -> None:
    assert last_success(tmp_path, RECIPE, now_s=NOW_S) == 0


def test_nothing_but_the_file_is_left_for_the_collector(tmp_path: Path) -> None:
    write(tmp_path / "a.prom", DONE, NOW_S)
    write(tmp_path / "a.prom", ERROR, NOW_S)
    assert [each.name for each in tmp_path.glob("*") if each.suffix == ".prom"] == ["a.prom"]
    assert (tmp_path / "a.prom").stat().st_mode & 0o444 == 0o444


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.prom"
    write(path, DONE, NOW_S)
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, ERROR, NOW_S + 1)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_two_runs_that_end_at_once_write_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_LOCK_S", 0.05)
    with FileLock(tmp_path / ".a.prom.lock"), pytest.raises(StorageError, match="holds"):
        write_metrics(tmp_path / "a.prom", DONE, recipe=RECIPE, seconds=1, now_s=NOW_S)


def test_a_number_that_is_none_is_left_out() -> None:
    gates = [{**GATES[0], "value": math.nan, "bound": math.inf}]
    text = metrics_text({**DONE, "gates": gates}, recipe=RECIPE, seconds=1, now_s=NOW_S, before_s=0)
    assert not any(name[0] in ("compress_gate_value", "compress_gate_bound") for name in samples(text))


@pytest.mark.parametrize("name", ["metrics.txt", "metrics", "nowhere/a.prom", "folder.prom"])
def test_a_file_that_the_collector_would_not_read_is_refused_before_the_run(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.prom").mkdir()
    with pytest.raises(UsageError, match="--metrics-file"):
        check_metrics_file(tmp_path / name)
    check_metrics_file(tmp_path / "a.prom")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize("document", [DONE, FAILED, ERROR])
def test_promtool_finds_nothing_to_say(document: dict[str, Any]) -> None:
    text = metrics_text(document, recipe=RECIPE, seconds=12.5, now_s=NOW_S, before_s=0)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
