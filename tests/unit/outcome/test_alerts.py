"""`deploy/run-alerts.yaml` watches metrics that a metrics file has, and fires when it should."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from compress.outcome.metrics_file import metrics_text

RULES = Path(__file__).parents[3] / "deploy" / "run-alerts.yaml"
GATE = {
    "name": "kl_mean",
    "relation": "<=",
    "limit": 0.06,
    "value": 0.1,
    "bound": 0.1,
    "passed": False,
    "note": "",
}
DAY_S = 24 * 3600
CASES: list[tuple[str, dict[str, Any], float, float, set[str]]] = [
    ("all is well", {"status": "done", "exit_code": 0}, 0, 0, set()),
    ("nothing changed", {"status": "unchanged", "exit_code": 0}, 0, 0, set()),
    ("an error", {"status": "error", "exit_code": 5}, 0, 0, {"RunFailed"}),
    ("two at once", {"status": "error", "exit_code": 75}, 0, 0, set()),
    ("a gate", {"status": "gate_failed", "exit_code": 3, "gates": [GATE]}, 0, 0, {"GateFailed"}),
    ("a schedule that stopped", {"status": "done", "exit_code": 0}, 2 * DAY_S, 0, {"NoRun"}),
    ("days of errors", {"status": "error", "exit_code": 5}, 0, 4 * DAY_S, {"RunFailed", "NoSuccess"}),
]


def rules() -> list[dict[str, Any]]:
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    return list(group["rules"])


def text_of(document: dict[str, Any], *, age_s: float, success_age_s: float) -> str:
    """Return the metrics of a run that ended so many seconds before the time 10 days."""
    now_s = 10.0 * DAY_S - age_s
    return metrics_text(document, recipe="nightly", seconds=60.0, now_s=now_s, before_s=now_s - success_age_s)


def test_the_alerts_watch_metrics_that_exist() -> None:
    text = text_of({"status": "done", "exit_code": 0, "gates": [GATE]}, age_s=0, success_age_s=0)
    exported = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    for rule in rules():
        names = set(re.findall(r"compress_\w+", rule["expr"]))
        assert names
        assert names <= exported
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    tests = []
    for name, document, age_s, success_age_s, fires in CASES:
        series = []
        for line in text_of(document, age_s=age_s, success_age_s=success_age_s).splitlines():
            if not line.startswith("#"):
                labelled, _, value = line.rpartition(" ")
                series.append({"series": labelled, "values": f"{value}x240"})
        alerts = [
            {
                "eval_time": "10d",
                "alertname": rule["alert"],
                "exp_alerts": [expected(rule)] if rule["alert"] in fires else [],
            }
            for rule in rules()
        ]
        tests.append({"name": name, "interval": "1h", "input_series": series, "alert_rule_test": alerts})
    file = tmp_path / "tests.yaml"
    document_of_tests = {"rule_files": [str(RULES)], "evaluation_interval": "1h", "tests": tests}
    YAML(typ="safe").dump(document_of_tests, file)
    checked = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def expected(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the alert as promtool expects it: the labels of its series, and its filled-in texts."""
    labels = {"recipe": "nightly", **rule["labels"]}
    if rule["alert"] == "RunFailed":
        labels["status"] = "error"
    if rule["alert"] == "GateFailed":
        labels["gate"] = "kl_mean"
    texts = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for key, text in rule["annotations"].items()
    }
    return {"exp_labels": labels, "exp_annotations": texts}
